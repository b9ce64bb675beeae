"""Checks the kernels on a GPU by value, then measures them beside what the GPU could do at best.

    python -m splitserve.bench.kernels.gpu_check [--json FILE] [--seconds 540]

Needs torch for CUDA and Triton (and for the worker's figures and cuda_ipc what a worker needs); runs from a
checkout (PYTHONPATH=src) as well. Writes the file after every line, so that a run that is cut short leaves
what it has. Without a GPU it reports that, runs the same checks in Triton's interpreter and the figures'
code in tiny shapes, compiles every kernel for sm_90, and ends with 0 if all is well; it writes nothing. A
wrong result ends with 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..environment import environment
from ..peers.transformers_peer import PeerFailed

if TYPE_CHECKING:
    from .gpu_timing import Ceilings, Figure
    from .sm90 import Compiled

CHECKS_WEIGHT = 240.0  # most of it compiles kernels
RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"


@dataclass
class Report:
    """Prints every line, and keeps it in the file."""

    file: Path | None
    deadline: float
    wrong: list[str] = field(default_factory=list)
    lines: list[dict[str, object]] = field(default_factory=list)
    where: dict[str, object] = field(default_factory=dict)  # what the figures were measured with

    def add(self, text: str, line: dict[str, object]) -> None:
        print(text, flush=True)
        self.lines.append(line)
        if self.file is not None:
            self.file.write_text(
                json.dumps({"environment": self.where, "lines": self.lines}, indent=1) + "\n"
            )

    def out_of_time(self, section: str, until: float) -> bool:
        """Whether the time is up; reports it then."""
        late = time.monotonic() > until
        if late:
            self.add(f"{section}: out of time, the rest is left out", {"section": section, "left_out": True})
        return late


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="begin nothing new after so many (default: %(default)s)"
    )
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    report = Report(options.json if gpu else None, time.monotonic() + options.seconds)
    if gpu:
        report.where = environment() | gpu_environment()
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    else:
        print("No GPU here: the checks run in Triton's interpreter, nothing is measured.")
        os.environ["TRITON_INTERPRET"] = "1"
        from . import triton_interpreter

        triton_interpreter.install()
    device = "cuda" if gpu else "cpu"
    run_parts(report, device)
    if not gpu:
        check_compiled(report)
    print(f"wrong: {', '.join(report.wrong)}" if report.wrong else "all checks passed")
    return 1 if report.wrong else 0


def run_parts(report: Report, device: str) -> None:
    """The checks, then each section of figures; each has its share of the time that is left, and what it does
    not need is the others'."""
    from .gpu_timing import measure_ceilings

    ceilings: Ceilings | None = None
    parts = sections()
    weights = [CHECKS_WEIGHT, *(part.weight for part in parts)]
    for number in range(len(weights)):
        now = time.monotonic()
        until = now + max(0.0, report.deadline - now) * weights[number] / sum(weights[number:])
        if number == 0:
            check_values(report, device, until)
            ceilings = measure_ceilings(device)
            text = f"copy {ceilings.copy / 1e12:.2f} TB/s, product {ceilings.flops / 1e12:.0f} TFLOP/s, "
            text += f"smallest kernel {ceilings.launch_us:.2f} us"
            report.add(
                text if device != "cpu" else "The figures' code, in tiny shapes:",
                {"ceilings": asdict(ceilings)},
            )
        elif ceilings is not None:
            measure(report, parts[number - 1], device, ceilings, until)
    for name, more in exact_costs(report.lines):
        report.add(f"exact costs {more:4.0%} more: {name}", {"exact": name, "costs_more": more})


def check_values(report: Report, device: str, until: float) -> None:
    from .kernel_checks import checks

    for check in checks(big=device != "cpu"):
        if report.out_of_time("checks", until):
            return
        try:
            error, note = check.run(device), ""
        except Exception as problem:  # the next kernel is still worth a look: this is the one run on a GPU
            error, note = float("inf"), f" {type(problem).__name__}: {str(problem)[:200]}"
        good = error <= check.allowed
        if not good:
            report.wrong.append(check.name)
        line: dict[str, object] = {
            "check": check.name,
            "error": error,
            "allowed": check.allowed,
            "good": good,
        }
        report.add(f"{'ok   ' if good else 'WRONG'} {check.name:60s} {error:.1e}{note}", line)


def measure(report: Report, part: Section, device: str, ceilings: Ceilings, until: float) -> None:
    gc.collect()  # what the part before held
    if device != "cpu":
        torch.cuda.empty_cache()
    figures = part.figures(device, ceilings, device != "cpu")
    while (
        not report.out_of_time(part.name, until) and (figure := _next(figures, part.name, report)) is not None
    ):
        text = (
            f"{figure.what:105s} {figure.us:9.1f} us {figure.rate / 1e12:8.3f} T{figure.unit}/s  "
            f"{figure.ratio:4.0%} of its floor"
        )
        text = text if device != "cpu" else f"ran   {figure.what}"
        report.add(text, asdict(figure) | {"section": part.name, "ratio": figure.ratio})


def _next(figures: Iterator[Figure], section: str, report: Report) -> Figure | None:
    try:
        return next(figures, None)
    except PeerFailed as problem:  # no fault of ours, and the last figure of its section
        report.add(
            f"left out: the peer gave no figure: {problem}", {"section": section, "peer_failed": str(problem)}
        )
        return None
    except Exception as problem:  # the other sections' results are still worth having
        report.wrong.append(section)
        report.add(
            f"WRONG {section}: {type(problem).__name__}: {str(problem)[:300]}",
            {"section": section, "error": str(problem)[:300]},
        )
        return None


@dataclass(frozen=True, slots=True)
class Section:
    """What is measured together. ``weight``: its share of the time, beside the others'."""

    name: str
    weight: float
    figures: Callable[[str, Ceilings, bool], Iterator[Figure]]


def sections() -> list[Section]:
    """In this order; each yields its figures one by one."""
    from . import kernel_figures as kernels
    from .engine_figures import engine_figures

    return [
        Section("decode attention", 40, kernels.decode_figures),
        Section("prefill attention", 30, kernels.prefill_figures),
        Section("small kernels", 10, kernels.small_figures),
        Section("blocks", 5, kernels.block_figures),
        Section("sampling", 15, kernels.sampling_figures),
        Section("engine, Qwen3-0.6B", 45, engine_figures("Qwen3-0.6B", exact=False)),
        Section("engine, Llama-3.1-8B", 75, engine_figures("Llama-3.1-8B", exact=False)),
        Section("engine, Qwen3-4B", 60, engine_figures("Qwen3-4B", exact=False)),
        Section("engine, Qwen3-4B, exact", 45, engine_figures("Qwen3-4B", exact=True)),
        Section("worker", 90, worker_figures),
        Section("linears", 30, kernels.linear_figures),
        Section("other tiles for decode attention", 15, kernels.decode_tile_figures),
    ]


def worker_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    """Imported when it is their turn: they need packages that the kernels do without."""
    from .gpu_worker import worker_figures as figures

    yield from figures(device, ceilings, big)


def exact_costs(lines: list[dict[str, object]]) -> Iterator[tuple[str, float]]:
    """For each figure of an exact engine, how much longer it takes than without, where that was measured
    too."""
    from .engine_figures import EXACT_SUFFIX

    times = {str(line["what"]): float(str(line["us"])) for line in lines if "what" in line}
    for name, us in times.items():
        plain = name.replace(EXACT_SUFFIX, "", 1)
        if name.startswith("Qwen3-4B" + EXACT_SUFFIX) and plain in times and "graphs captured" not in name:
            yield plain, us / times[plain] - 1


def check_compiled(report: Report) -> None:
    """In as many processes as there are cores: of the attention kernels there are hundreds, the most
    different ones first."""
    from .attention_variants import VARIANTS
    from .compile_kernels import OTHERS, compile_case

    os.environ.pop("TRITON_INTERPRET", None)  # in the processes that compile
    cases = [*OTHERS, *VARIANTS]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        for number, (case, compiled) in enumerate(
            [(case, pool.submit(compile_case, case)) for case in cases]
        ):
            if report.out_of_time(f"compilation, {number} of {len(cases)}", report.deadline):
                pool.shutdown(cancel_futures=True)
                return
            add_compiled(report, case, compiled)


def add_compiled(report: Report, case: str, compiled: Future[list[Compiled]]) -> None:
    from .compile_bounds import FEW_BYTES, faults_of

    try:
        kernels = [kernel.as_json() for kernel in compiled.result()]
    except Exception as problem:  # the next kernel is still worth a look
        report.wrong.append(f"compilation of {case}")
        text = f"{type(problem).__name__}: {str(problem)[:200]}"
        report.add(f"WRONG {case}: {text}", {"compiled": case, "good": False, "error": text})
        return
    faults = faults_of(case, kernels, FEW_BYTES)
    report.wrong += faults
    for kernel in kernels:
        text = (
            f"{kernel['registers']:3d} registers, {kernel['stack']:2d} B stack, {kernel['shared']:6d} "
            "B shared, "
        )
        text += f"{kernel['programs_per_sm']:2d} a multiprocessor"
        line: dict[str, object] = {"compiled": case, "good": not faults} | kernel
        report.add(f"{'WRONG' if faults else 'ok   '} {case:52s} {kernel['name']:24s} {text}", line)


def gpu_environment() -> dict[str, object]:
    import triton

    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
