"""What will run on a GPU once has run before, in tiny shapes in the interpreter: every figure, and a few of
the checks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.engine_figures import engine_figures
from splitserve.bench.kernels.gpu_check import Report, Section, exact_costs, measure, run_parts, sections
from splitserve.bench.kernels.gpu_timing import Ceilings, Figure, measure_ceilings
from splitserve.bench.kernels.kernel_checks import Check, checks
from splitserve.bench.peers.transformers_peer import PeerFailed, peer_us

triton_interpreter.install()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

QUICK = ("norm", "gate", "rope", "embedding", "blocks", "checksums", "gumbel", "decode attention, fp8",
         "attention, prefill 64 float16")  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="figures of a GPU are not for the interpreter")
def test_every_figure_can_be_made() -> None:
    ceilings = measure_ceilings("cpu")
    for part in sections():
        if part.name.startswith("engine"):
            continue  # has its own test
        figures = list(part.figures("cpu", ceilings, False))
        assert figures, part.name
        assert all(figure.us > 0 and figure.ratio > 0 for figure in figures)


@pytest.mark.parametrize(
    "check",
    [check for check in checks(big=False) if check.name.startswith(QUICK)],
    ids=lambda check: check.name,
)
def test_a_check_passes(check: Check) -> None:
    assert check.run("cpu") <= check.allowed


@pytest.mark.skipif(torch.cuda.is_available(), reason="figures of a GPU are not for the interpreter")
def test_every_figure_of_the_engine_can_be_made() -> None:
    ceilings = measure_ceilings("cpu")
    figures = [
        figure
        for exact in (False, True)
        for figure in engine_figures("Qwen3-4B", exact)("cpu", ceilings, False)
    ]
    assert all(figure.us > 0 and figure.ratio > 0 for figure in figures)
    whats = " ".join(figure.what for figure in figures)
    for part in ("decode step, batch 2", "the device's part", "prefill, 20 tokens", "exact: decode step"):
        assert part in whats, part


def test_a_part_that_is_out_of_time_leaves_the_others_theirs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr("splitserve.bench.kernels.gpu_check.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("splitserve.bench.kernels.kernel_checks.checks", lambda big: iter(()))

    def figures(seconds: float, count: int) -> Callable[[str, Ceilings, bool], Iterator[Figure]]:
        def make(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
            for number in range(count):
                clock[0] += seconds
                yield Figure(f"{seconds:g} s, {number}", 1.0, 1.0, 1.0, "B")

        return make

    parts = [
        Section("slow", 1, figures(30, 9)),
        Section("quick", 1, figures(1, 3)),
        Section("last", 1, figures(5, 4)),
    ]
    monkeypatch.setattr("splitserve.bench.kernels.gpu_check.sections", lambda: parts)
    monkeypatch.setattr("splitserve.bench.kernels.gpu_check.CHECKS_WEIGHT", 0.0)
    report = Report(None, deadline=190.0)
    run_parts(report, "cpu")
    message = capsys.readouterr().out
    assert message.count("ran   30 s") == 2, "a third of 90 s, and the one that it was at"
    assert "slow: out of time, the rest is left out" in message
    assert message.count("ran   1 s") == 3
    assert message.count("ran   5 s") == 4
    assert not report.wrong


def test_a_part_that_fails_is_wrong_and_ends_there() -> None:
    def broken(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
        yield Figure("first", 1.0, 1.0, 1.0, "B")
        raise RuntimeError("no such instruction")

    report = Report(None, deadline=float("inf"))
    measure(report, Section("part", 1, broken), "cpu", Ceilings(1, 1, 1), float("inf"))
    assert report.wrong == ["part"]


def test_a_peer_that_fails_costs_only_its_own_figure(capsys: pytest.CaptureFixture[str]) -> None:
    def ours_then_theirs(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
        yield Figure("ours", 1.0, 1.0, 1.0, "B")
        raise PeerFailed("AttributeError: no generate_batch")

    report = Report(None, deadline=float("inf"))
    measure(report, Section("worker", 1, ours_then_theirs), "cpu", Ceilings(1, 1, 1), float("inf"))
    assert report.wrong == []
    assert (
        "ran   ours\nleft out: the peer gave no figure: AttributeError: no generate_batch"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("code", "why"),
    [("raise ValueError('no such option')", "ValueError: no such option"), ("", "within 0 s")],
)
def test_a_peer_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, why: str
) -> None:
    ours = subprocess.run

    def other_program(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return ours([sys.executable, "-S", "-c", code or "import time; time.sleep(60)"], **options)

    monkeypatch.setattr("splitserve.bench.peers.transformers_peer.subprocess.run", other_program)
    monkeypatch.setattr("splitserve.bench.peers.transformers_peer.PATIENCE_S", 60.0 if code else 0.2)
    with pytest.raises(PeerFailed, match=why):
        peer_us(tmp_path, "cpu", 1, 1, 1)


def test_the_cost_of_exact_is_named_beside_the_same_figure_without() -> None:
    lines: list[dict[str, object]] = [
        {"what": "Qwen3-4B: decode step, batch 8", "us": 100.0},
        {"what": "Qwen3-4B, exact: decode step, batch 8", "us": 112.0},
        {"what": "Qwen3-4B, exact: prefill, 7 tokens", "us": 1.0},
    ]
    ((name, more),) = exact_costs(lines)
    assert name == "Qwen3-4B: decode step, batch 8"
    assert more == pytest.approx(0.12)
