"""What will run on a GPU once has run before, in tiny shapes in the interpreter: every figure, and a few of the checks."""

from __future__ import annotations

import pytest
import torch

from splitserve.bench import triton_interpreter
from splitserve.bench.engine_figures import engine_figures
from splitserve.bench.gpu_check import sections
from splitserve.bench.gpu_timing import measure_ceilings
from splitserve.bench.kernel_checks import Check, checks

triton_interpreter.install()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

QUICK = ("norm", "gate", "rope", "embedding", "blocks", "checksums", "gumbel", "decode attention, fp8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="figures of a GPU are not for the interpreter")
def test_every_figure_can_be_made() -> None:
    ceilings = measure_ceilings("cpu")
    for name, section in sections():
        if name == "engine":
            continue  # has its own test
        figures = list(section("cpu", ceilings, False))
        assert figures, name
        assert all(figure.us > 0 and figure.ratio > 0 for figure in figures)


@pytest.mark.parametrize("check", [check for check in checks(big=False) if check.name.startswith(QUICK)], ids=lambda check: check.name)
def test_a_check_passes(check: Check) -> None:
    assert check.run("cpu") <= check.allowed


@pytest.mark.skipif(torch.cuda.is_available(), reason="figures of a GPU are not for the interpreter")
def test_every_figure_of_the_engine_can_be_made() -> None:
    figures = list(engine_figures("cpu", measure_ceilings("cpu"), big=False))
    assert all(figure.us > 0 and figure.ratio > 0 for figure in figures)
    whats = " ".join(figure.what for figure in figures)
    for part in ("decode step, batch 2", "the device's part", "prefill, 20 tokens", "exact: decode step"):
        assert part in whats, part
