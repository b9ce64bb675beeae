"""Checks the kernels on a GPU by value, then measures them beside what the GPU could do at best.

    python -m splitserve.bench.gpu_check [--json FILE] [--seconds 540]

Needs torch for CUDA and Triton; runs from a checkout (PYTHONPATH=src) as well. Writes the file after every line, so that a run that is
cut short leaves what it has. Where there is no GPU it says so, runs the same checks in Triton's interpreter and the figures' code in tiny
shapes, compiles every kernel for sm_90, and ends with 0 if all is well; it writes nothing. A wrong result ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .environment import environment

if TYPE_CHECKING:
    from .gpu_timing import Ceilings, Figure

RESULTS = Path(__file__).parent / "results" / "gpu.json"


@dataclass
class Report:
    """Prints every line, and keeps it in the file."""

    file: Path | None
    deadline: float
    wrong: list[str] = field(default_factory=list)
    lines: list[dict[str, object]] = field(default_factory=list)

    def add(self, text: str, line: dict[str, object]) -> None:
        print(text, flush=True)
        self.lines.append(line)
        if self.file is not None:
            self.file.write_text(json.dumps({"environment": environment() | gpu_environment(), "lines": self.lines}, indent=1) + "\n")

    def out_of_time(self, section: str) -> bool:
        late = time.monotonic() > self.deadline
        if late:
            self.add(f"{section}: out of time, the rest is left out", {"section": section, "left_out": True})
        return late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing new after so many (default: %(default)s)")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    report = Report(options.json if gpu else None, time.monotonic() + options.seconds)
    if gpu:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    else:
        print("No GPU here: the checks run in Triton's interpreter, nothing is measured.")
        os.environ["TRITON_INTERPRET"] = "1"
        from . import triton_interpreter

        triton_interpreter.install()
    device = "cuda" if gpu else "cpu"
    check_values(report, device)
    measure(report, device)
    if not gpu:
        check_compiled(report)
    print(f"wrong: {', '.join(report.wrong)}" if report.wrong else "all checks passed")
    return 1 if report.wrong else 0


def check_values(report: Report, device: str) -> None:
    from .kernel_checks import checks

    for check in checks(big=device != "cpu"):
        if report.out_of_time("checks"):
            return
        try:
            error, note = check.run(device), ""
        except Exception as problem:  # the next kernel is still worth a look: this is the one run on a GPU
            error, note = float("inf"), f" {type(problem).__name__}: {str(problem)[:200]}"
        good = error <= check.allowed
        if not good:
            report.wrong.append(check.name)
        line: dict[str, object] = {"check": check.name, "error": error, "allowed": check.allowed, "good": good}
        report.add(f"{'ok   ' if good else 'WRONG'} {check.name:60s} {error:.1e}{note}", line)


def measure(report: Report, device: str) -> None:
    from .gpu_timing import measure_ceilings

    ceilings = measure_ceilings(device)
    text = f"copy {ceilings.copy / 1e12:.2f} TB/s, product {ceilings.flops / 1e12:.0f} TFLOP/s, smallest kernel {ceilings.launch_us:.2f} us"
    report.add(text if device != "cpu" else "The figures' code, in tiny shapes:", {"ceilings": asdict(ceilings)})
    for name, section in sections():
        figures = section(device, ceilings, device != "cpu")
        while (figure := _next(figures, name, report)) is not None:
            text = f"{figure.what:105s} {figure.us:9.1f} us {figure.rate / 1e12:8.3f} T{figure.unit}/s  {figure.ratio:4.0%} of its floor"
            text = text if device != "cpu" else f"ran   {figure.what}"
            report.add(text, asdict(figure) | {"section": name, "ratio": figure.ratio})
            if report.out_of_time(name):
                break


def _next(figures: Iterator[Figure], section: str, report: Report) -> Figure | None:
    try:
        return next(figures, None)
    except Exception as problem:  # what the other sections have to say is still worth having
        report.wrong.append(section)
        report.add(f"WRONG {section}: {type(problem).__name__}: {str(problem)[:300]}", {"section": section, "error": str(problem)[:300]})
        return None


def sections() -> list[tuple[str, Callable[[str, Ceilings, bool], Iterator[Figure]]]]:
    """What is measured, in this order; each yields its figures one by one."""
    from . import kernel_figures as kernels
    from .engine_figures import engine_figures
    from .gpu_worker import worker_figures

    return [
        ("decode attention", kernels.decode_figures),
        ("prefill attention", kernels.prefill_figures),
        ("small kernels", kernels.small_figures),
        ("blocks", kernels.block_figures),
        ("sampling", kernels.sampling_figures),
        ("engine", engine_figures),
        ("worker", worker_figures),
        ("linears", kernels.linear_figures),
        ("other tiles for decode attention", kernels.decode_tile_figures),
    ]


def check_compiled(report: Report) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"{__package__}.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        report.wrong.append("compilation for sm_90")
        report.add(f"WRONG compilation for sm_90: {done.stderr[-500:]}", {"check": "compilation", "good": False})
        return
    for case, kernels in json.loads(done.stdout).items():
        for kernel in kernels:
            good = kernel["stack"] == kernel["spills"] == 0
            if not good:
                report.wrong.append(f"{case} spills")
            text = f"{kernel['registers']:3d} registers, {kernel['shared']:6d} B shared, {kernel['programs_per_sm']:2d} a multiprocessor"
            report.add(f"{'ok   ' if good else 'WRONG'} {case:22s} {kernel['name']:24s} {text}", {"compiled": case, "good": good} | kernel)


def gpu_environment() -> dict[str, object]:
    import triton

    gpu = torch.cuda.get_device_properties(0)
    return {"gpu": gpu.name, "multiprocessors": gpu.multi_processor_count, "torch": torch.__version__, "triton": triton.__version__}


if __name__ == "__main__":
    sys.exit(main())
