"""A request whose first token would come too late is refused at once, by a forecast."""

from __future__ import annotations

from typing import Any

import pytest
from support.lifecycle_bench import Bench, ends

from splitserve.coordinator.lifecycle.forecast import Forecast


def measured(**limits: Any) -> Bench:
    """Its prefill worker computes 10 tokens a second, and three requests run already: no more fit."""
    bench = Bench(**limits)
    for n in (1, 2, 3):
        bench.load("p", [], counters={"full_step_tokens": 100.0 * n, "full_step_seconds": 10.0 * n})
    for n in range(4):
        bench.submit(f"running-{n}")
    return bench


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    bench = measured(ttft_slo_s={"premium": 1.0, "free": 3.0})
    (refused,) = ends(bench.submit("late", priority_class="premium"))
    assert (refused.error, refused.retry_after_s) == ("overloaded", pytest.approx(0.5))
    assert "about 1.5 s, and 1 s are allowed (premium)" in refused.message
    assert not ends(bench.submit("patient", priority_class="free"))
    assert not ends(bench.submit("standard has no objective"))
    assert bench.core.counters()["refused_early"] == 1


def test_a_deadline_is_an_objective_too() -> None:
    bench = measured()
    (refused,) = ends(bench.submit("late", deadline=1.0))
    assert refused.error == "overloaded"
    assert not ends(bench.submit("later", deadline=5.0))
    (over,) = ends(bench.submit("over", deadline=-0.1))
    assert ", and 0 s are allowed" in over.message


def test_nobody_is_refused_by_a_forecast_that_nobody_can_make() -> None:
    bench = Bench(ttft_slo_s={"standard": 1e-9})
    for n in range(4):
        assert not ends(bench.submit(f"r{n}"))


def test_the_forecast_follows_the_workers_and_their_caches() -> None:
    bench, forecast = Bench(), Forecast()
    here = bench.core.pools.open_of_role("prefill")
    (worker,) = here

    def receive(**counters: float) -> None:
        bench.load("p", [], counters=counters)
        assert worker.load is not None
        forecast.report(worker, worker.load)

    for n in (1, 2):
        receive(
            full_step_tokens=1000.0 * n, full_step_seconds=10.0 * n, prompt_tokens=100.0, cached_tokens=75.0
        )
        assert forecast.tokens_per_s(here) is None, "too little is known"
    receive(
        full_step_tokens=2010.0, full_step_seconds=50.0, prompt_tokens=100.0, cached_tokens=75.0
    )  # a step hung
    assert forecast.seconds(here, 300, 100) == pytest.approx(1.0)  # a quarter of 400 at 100 a second
    bench.hello("p2", "prefill")
    assert forecast.tokens_per_s(here) == 200
    assert forecast.seconds(here, 300, 100) == pytest.approx(0.5)
    for n in range(1, 4):  # its clock stands: no speed
        receive(full_step_tokens=2010.0 + n, full_step_seconds=50.0, prompt_tokens=100.0, cached_tokens=75.0)
    assert forecast.tokens_per_s(here) == 200
    for n in range(1, 16):
        receive(
            full_step_tokens=2010.0 + 20_000 * n,
            full_step_seconds=50.0 + 100 * n,
            prompt_tokens=100.0,
            cached_tokens=75.0,
        )
    assert forecast.tokens_per_s(here) == pytest.approx(400, rel=0.01)
    assert forecast.known
    forecast.forget(worker)
    assert forecast.tokens_per_s(here) is None
    assert not forecast.known
