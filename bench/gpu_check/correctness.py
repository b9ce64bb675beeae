"""Kernels by value, decode graphs beside steps without, exact mode, blocks between processes, and a few of
them under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator

import torch

from ...engine.step.decode_graphs import CudaRecorder, buckets_up_to
from ..kernels.device_mover_checks import cuda_ipc, staging
from ..kernels.engine import make_batch
from ..kernels.engine_figures import BLOCK_SIZE, QWEN3_600M, TINY, BareEngine, run_again
from ..kernels.exact_check import exact_engine
from ..kernels.kernel_checks import Check, checks
from ..kernels.kernel_inputs import relative_error
from .line import Line, Place, checked, left_out, read_lines

CONTEXT = 200
GRAPH_ERROR = 0.02  # bfloat16; cuBLAS may multiply a padded batch by another kernel
ATTENTION = ("decode attention, bfloat16", "decode attention, fp8", "prefill attention, bfloat16")
SANITIZED = {
    "memcheck": (
        *ATTENTION,
        *(f"{name}, torch.bfloat16" for name in ("norm", "gate", "rope and store", "low rank")),
        *("rope and store, fp8", "embedding", "exact linear", "blocks packed", "checksums", "sampling"),
    ),
    "racecheck": (*ATTENTION, "norm, torch.bfloat16", "exact linear", "sampling"),
}
SMALL_CHECKS = f"{__name__}:small_checks"
SANITIZER_FOUND = 99  # its exit status


def kernels(place: Place, index: str, count: str) -> Iterator[Line]:
    """Every ``count``-th check, from ``index`` on."""
    interpret(place)
    yield from results(list(checks(place.big))[int(index) :: int(count)], place.device)


def results(wanted: Iterable[Check], device: str) -> Iterator[Line]:
    for check in wanted:
        try:
            error, note = check.run(device), ""
        except Exception as problem:  # the next kernel is still worth a look
            if "CUDA error" in str(problem) or "Triton Error" in str(problem):
                raise  # the context is lost: nothing after this would be true
            error, note = float("inf"), f"{type(problem).__name__}: {str(problem)[:200]}"
        yield checked(check.name, error, check.allowed, note)


def graphs(place: Place) -> Iterator[Line]:
    """Logits by the graph of each bucket, filled and with a padding row, beside the same step without."""
    interpret(place)
    shape, largest, record = (QWEN3_600M, 256, CudaRecorder()) if place.big else (TINY, 4, run_again)
    context = CONTEXT if place.big else 20
    engine = BareEngine(
        shape,
        torch.device(place.device),
        False,
        1024,
        (largest, record),
        num_tokens=largest * (context + BLOCK_SIZE),
    )
    for bucket in buckets_up_to(largest):
        for num_seqs in sorted({max(1, bucket - 1), bucket}):
            batch = make_batch(num_seqs, context, 1, BLOCK_SIZE)
            batch.token_ids[:] %= engine.config.vocab_size
            eager = engine.step_logits(batch).clone()
            error = relative_error(engine.decode_logits(batch), eager)
            yield checked(f"graph of {bucket} with {num_seqs} sequences, beside no graph", error, GRAPH_ERROR)


def exact(place: Place) -> Iterator[Line]:
    interpret(place)
    yield checked("exact: bits of logits through a whole model", exact_engine(place.big, place.device), 0)


def blocks(place: Place) -> Iterator[Line]:
    yield checked("blocks through page-locked records", staging(place.device), 0)
    if place.big:
        yield checked("blocks between two processes on one card by cuda_ipc", cuda_ipc(place.device), 0)
        yield checked("the same, cut as for 2 and 4 cards", cuda_ipc(place.device, 2, 4), 0)


def sanitized(place: Place, tool: str) -> Iterator[Line]:
    """Small checks under compute-sanitizer, where it is installed; in a rehearsal without it, too."""
    program = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if program is None and place.big:
        yield left_out(tool, "compute-sanitizer is not installed")
        return
    lines = place.work / "lines" / f"under {tool}.jsonl"
    command = [sys.executable, "-m", f"{__package__}.part", SMALL_CHECKS, str(lines)]
    command += [str(place.work), place.device, "600", tool]
    if program is not None:
        command = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND), *command]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # so that each tensor has its own bounds
    )
    print(done.stdout)
    yield from read_lines(lines)
    found = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", done.stdout)
    errors = sum(int(number) for pair in found for number in pair if number)
    first = next(
        (line for line in done.stdout.splitlines() if re.match(r"=+ (Invalid|Error|Warning|.*hazard)", line)),
        "",
    )
    yield Line(
        f"{tool}: errors found",
        good=done.returncode == 0 and not errors,
        value=errors,
        note=first or ("" if done.returncode == 0 else f"ended with status {done.returncode}"),
    )


def small_checks(place: Place, tool: str) -> Iterator[Line]:
    """In the interpreter's sizes, on a GPU too."""
    interpret(place)
    yield from results((c for c in checks(big=False) if c.name.startswith(SANITIZED[tool])), place.device)


def interpret(place: Place) -> None:
    """Without a GPU, let Triton's interpreter compute."""
    if not place.big:
        from ..kernels import triton_interpreter

        triton_interpreter.install()
