"""What gpu_check runs on a GPU, in small sizes on one that is played: all tensors of a kernel, of a reference
and of a comparison lie on the device that was named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.played_gpu import PlayedGpu, played_gpu

from splitserve.bench.gpu_check import correctness, speed
from splitserve.bench.gpu_check.line import Place
from splitserve.bench.kernels import (
    device_mover_checks,
    engine_figures,
    exact_check,
    gate_up,
    gpu_timing,
    kernel_figures,
    triton_interpreter,
)
from splitserve.bench.kernels.gpu_timing import Ceilings
from splitserve.bench.kernels.kernel_checks import Check, checks
from splitserve.engine.step import prefill_graphs

triton_interpreter.install()
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs gpu_check itself"),
]
FIGURES = (
    kernel_figures.decode_figures, kernel_figures.decode_tile_figures, kernel_figures.prefill_figures,
    kernel_figures.small_figures, kernel_figures.block_figures, kernel_figures.sampling_figures,
    kernel_figures.linear_figures, kernel_figures.low_rank_figures, gate_up.gate_up_figures,
    engine_figures.engine_figures("Llama-3.1-8B", exact=False),
)  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedGpu]:
    def once(calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return 1.0

    for module in (kernel_figures, gate_up, gpu_timing):
        monkeypatch.setattr(module, "microseconds", once)
    monkeypatch.setattr(engine_figures, "device_us", lambda run, repeats: once([run]))
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator("cpu"))
    with played_gpu(monkeypatch) as gpu:
        for module in (correctness, engine_figures, exact_check):
            monkeypatch.setattr(module, "run_again", gpu.record)
        yield gpu


@pytest.mark.parametrize(
    "check", [*checks(big=False), *gate_up.checks(big=False)], ids=lambda check: check.name
)
def test_a_check_compares_what_is_on_the_gpu(check: Check, gpu: PlayedGpu) -> None:
    assert check.run("cuda") <= check.allowed
    assert gpu.variants or "float8 linear" in check.name, "a kernel ran there"


@pytest.mark.parametrize("figures", FIGURES, ids=lambda figures: figures.__name__)
def test_a_figure_is_taken_on_the_gpu(figures: Any, gpu: PlayedGpu) -> None:
    assert list(figures("cuda", Ceilings(1e12, 1e15, 1.0), False))
    assert gpu.variants


def test_a_prefill_by_a_graph_is_that_of_a_worker(gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_graphs, "TOKEN_BUCKETS", (4,))
    monkeypatch.setattr(prefill_graphs, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(prefill_graphs, "FASTER", 2)
    engine = engine_figures.BareEngine(
        engine_figures.TINY, torch.device("cuda"), False, 64, (1, gpu.record), num_tokens=64, prefill_tokens=4
    )
    short, long = (engine._batch(1, 0, num_tokens) for num_tokens in (3, 5))
    found = engine._replayed(short)
    assert found is not None
    assert torch.allclose(found, engine.step_logits(short), atol=0.05)
    assert engine._replayed(long) is None


def test_exact_mode_and_blocks_are_checked_on_the_gpu(gpu: PlayedGpu) -> None:
    assert exact_check.exact_engine(False, "cuda") == 0
    assert device_mover_checks.staging("cuda") == 0


def test_graphs_are_compared_on_the_gpu(gpu: PlayedGpu, tmp_path: Path) -> None:
    assert [line.good for line in correctness.graphs(Place("cuda", False, tmp_path))] == [True] * 5
    assert speed.MOST_FP8_SLOPE < 1
