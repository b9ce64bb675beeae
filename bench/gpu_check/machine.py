"""What the machine is, what it could do at best, every kernel compiled, and the models that other parts
serve."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..models import LLAMA_125M, LLAMA_500M, LLAMA_TINY, QWEN3, make_random_llama
from .line import MACHINE_FILE, Line, Place

MAX_LEN = 8192 + 256  # tokens of a sequence
SMALL = {**LLAMA_TINY, "num_hidden_layers": 2, "vocab_size": 320}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA_125M,
    "qwen3": {**LLAMA_125M, **QWEN3, "head_dim": 128},
    "served": LLAMA_500M,
}


def machine(place: Place) -> Iterator[Line]:
    """The ceilings go to a file for the other parts; what is installed, to the log."""
    from ..kernels.gpu_timing import measure_ceilings

    if place.big:
        gpu = torch.cuda.get_device_properties(0)
        facts = {"gpu": gpu.name, "multiprocessors": gpu.multi_processor_count, "memory": gpu.total_memory}
        (place.work / MACHINE_FILE).write_text(json.dumps(facts))
        for command in (["nvidia-smi"], ["nvcc", "--version"]):
            if shutil.which(command[0]):
                print(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    ceilings = measure_ceilings(place.device)
    (place.work / "ceilings.json").write_text(json.dumps(asdict(ceilings)))
    for what, value, unit in (
        ("ceiling: bytes copied (read and written) or read", ceilings.copy / 1e12, "TB/s"),
        ("ceiling: a large bfloat16 product", ceilings.flops / 1e12, "TFLOP/s"),
        ("the smallest kernel in a graph", ceilings.launch_us, "us"),
    ):
        yield Line(what, value=value, unit=unit, headline=place.big)


def compile_first(place: Place) -> Iterator[Line]:
    """What starts of the models that are measured compile, then kernels of each family and option, so that
    all later parts find them in Triton's cache."""
    from ..kernels.attention_variants import covering
    from ..kernels.compile_kernels import MEASURED, OTHERS
    from ..kernels.start_kernels import STARTED

    cases = [*STARTED, *map(str, covering()), *MEASURED, *OTHERS]
    yield from _compiled(cases if place.big else cases[-3:])


def compile_all(place: Place) -> Iterator[Line]:
    """Every attention kernel there is."""
    from ..kernels.attention_variants import VARIANTS

    yield from _compiled(list(VARIANTS) if place.big else list(VARIANTS)[:2])


def _compiled(cases: Sequence[str]) -> Iterator[Line]:
    """For sm_90, in as many processes as there are cores."""
    os.environ.pop("TRITON_INTERPRET", None)  # in the processes that compile
    workers = min(len(os.sched_getaffinity(0)), len(cases))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for case, found in zip(cases, pool.map(_compile, cases), strict=True):
            yield Line(f"compiled: {case}", good=found[0], note=found[1])


def _compile(case: str) -> tuple[bool, str]:
    """Whether its kernels are within their bounds, and what became of them. An exception becomes words:
    one that cannot go to another process would end all of them."""
    from ..kernels.compile_bounds import FEW_BYTES, faults_of
    from ..kernels.compile_kernels import compile_case

    try:
        kernels = [kernel.as_json() for kernel in compile_case(case)]
    except Exception as problem:
        return False, f"{type(problem).__name__}: {str(problem)[-200:]}"
    faults = faults_of(case, kernels, FEW_BYTES)
    resources = (
        f"{k['name']}: {k['registers']} registers, {k['stack']} B stack, {k['shared']} B shared, "
        f"{k['programs_per_sm']} a multiprocessor"
        for k in kernels
    )
    return not faults, "; ".join(faults or resources)


def models(place: Place) -> Iterator[Line]:
    """Random checkpoints in the work folder."""
    for name in MODELS:
        model_folder(place, name)
        yield Line(f"model {name} made", good=True)


def model_folder(place: Place, name: str) -> Path:
    """Its folder; makes it where the part "models" could not."""
    folder = place.work / "models" / name
    if not folder.exists():
        new = folder.with_name(f"{name}-{os.getpid()}")
        shape = MODELS[name] if place.big else SMALL | ({**QWEN3, "head_dim": 16} if name == "qwen3" else {})
        make_random_llama(new, **shape, max_position_embeddings=MAX_LEN)
        if not folder.exists():
            new.rename(folder)
    return folder
