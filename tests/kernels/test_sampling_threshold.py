"""The threshold of min-p, top-k and top-p, in Triton's interpreter: it keeps the scores that the
definitions keep, for peaked, flat and tied rows, whatever else is in the batch; and it is compiled to as few
instructions as when it was measured."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine.step.sampler import FilterParams, keep_likely_tokens
from splitserve.kernels.gpu import sampling_threshold
from splitserve.kernels.gpu.sampling_threshold import thresholds

triton_interpreter.install()
pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]
SHAPES = {
    "normal": lambda x: x * 3,
    "peaked": lambda x: torch.cat([x[:7] * 3 + 15, x[7:]]),
    "bfloat16": lambda x: (x * 3).bfloat16().float(),
    "rounded": lambda x: x.round(),
    "two values": lambda x: (x > 0).float(),
    "equal": lambda x: torch.full_like(x, -2.5),
    "zeros of both signs": lambda x: torch.where(x > 1, x, x.sign() * 0.0),
    "masked": lambda x: torch.where(x > 1.5, x, -torch.inf),
    "huge": lambda x: x * 1e37,
    "tiny": lambda x: x * 1e-37,
}


@pytest.fixture
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows long for the kernels: few lanes, and few slices."""
    monkeypatch.setattr(sampling_threshold, "LANES", 32)
    monkeypatch.setattr(sampling_threshold, "SLICES", 4)


def found(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((len(scores),), value, dtype=dtype)

    columns = (column(temperature), column(top_k, torch.int32), column(top_p), column(min_p))
    return (thresholds(scores, *columns) / temperature).tolist()  # type: ignore[no-any-return]


def kept_from(row: Tensor, threshold: float) -> int:
    """How many scores from the highest on; a threshold is one of them, or below all but -inf."""
    return int((row >= threshold).sum())


def check(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    x = scores / temperature
    threshold = found(scores[None], temperature, top_k, top_p, min_p)[0]
    floor = float(x.max()) + math.log(min_p) if min_p > 0 else -math.inf
    if min_p > 0:
        x = torch.where(x < x.max() + math.log(min_p), -torch.inf, x)
    count = min(top_k or len(x), len(x))
    largest = x.topk(count).values
    assert threshold >= floor - 1e-6 * abs(floor)
    if top_p >= 1:
        assert kept_from(x, threshold) == kept_from(x, max(float(largest[-1]), floor))
        return
    weights = (largest.double() - largest[0].double()).exp()
    wanted = top_p * weights.sum()
    higher, kept = weights[largest > threshold].sum(), weights[largest >= threshold].sum()
    assert higher <= wanted * (1 + 1e-5), "it keeps scores that it need not keep"
    assert kept >= wanted * (1 - 1e-5) or kept_from(x, threshold) >= count, "it keeps too few"
    assert threshold in x or kept_from(x, threshold) == int(x.isfinite().sum())


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 99),
    vocab_size=st.sampled_from([33, 300]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 1.7, 1e30]),
    top_k=st.sampled_from([0, 0, 2, 20, 150, 1000]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
)
def test_it_keeps_what_the_definitions_say(
    few_kept: None,
    shape: str,
    seed: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    random = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
    scores = SHAPES[shape](random)
    if shape == "huge":
        temperature = max(temperature, 1.0)
    check(scores, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("options", [(1.0, 40, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (1.0, 20, 0.95, 0.02)])
@pytest.mark.parametrize("shape", ["bfloat16", "peaked", "normal"])
def test_a_long_row_is_cut_as_on_a_cpu(shape: str, options: tuple[float, int, float, float]) -> None:
    row = SHAPES[shape](torch.randn(40_000, generator=torch.Generator().manual_seed(5)))
    temperature, top_k, top_p, min_p = options
    expected = row / temperature
    keep_likely_tokens(expected, FilterParams(top_k, top_p, min_p))
    threshold = found(row[None], *options)[0]
    assert (row / temperature >= threshold).tolist() == expected.isfinite().tolist()


def test_a_row_does_not_depend_on_its_batch(few_kept: None) -> None:
    rows = torch.stack([make(torch.randn(500)) for make in SHAPES.values()])
    options = (0.9, 0, 0.9, 0.01)
    assert found(rows, *options) == [found(row[None], *options)[0] for row in rows]


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_a_row_of_no_numbers_ends(few_kept: None, value: float) -> None:
    for row in (torch.full((300,), value), torch.randn(300).index_fill(0, torch.tensor([7]), value)):
        for top_k, top_p in ((5, 1.0), (0, 0.9), (5, 0.9)):
            found(row[None], 1.0, top_k, top_p, 0.1)


def test_rows_that_ask_for_nothing_keep_everything() -> None:
    assert found(torch.randn(1, 99), 0.0, 5, 0.5, 0.5) == [-math.inf]
    assert found(torch.randn(1, 99), 1.0, 0, 1.0, 0.0) == [-math.inf]


@pytest.mark.timeout(120)
def test_its_loops_are_as_short_as_those_that_were_measured() -> None:
    """On an H100: bench/results/sampling_h100.json. The goal in microseconds is gpu_check's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "splitserve.bench.kernels.threshold_loops"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["vocab_size"] for line in lines} == {128256, 151936}
    most = {"_survey_kernel": 16, "_sums_kernel": 43, "_copy_kernel": 32, "_narrow_kernel": 36}
    for line in lines:
        assert line["instructions_per_score"].keys() == most.keys()
        assert all(line["instructions_per_score"][name] <= most[name] for name in most), line
