"""How busy a worker is, and how long its start took, as it reports them."""

from __future__ import annotations

import pytest

from splitserve.engine.step.step_progress import BusyClock
from splitserve.engine.worker_readings import WorkerReadings


def test_steps_that_overlap_count_once() -> None:
    clock = BusyClock()
    clock.begin(1.0)
    assert clock.seconds(2.5) == 1.5, "the running step counts"
    clock.end(3.0)
    clock.begin(2.0)  # was launched while the first ran
    clock.end(4.0)
    clock.begin(10.0)
    clock.end(11.0)
    assert clock.seconds(99.0) == pytest.approx(4.0), "from 1 to 4, and from 10 to 11"


def test_the_start_ends_with_the_first_coordinator() -> None:
    times = iter([10.0, 10.25, 99.0])
    readings = WorkerReadings(lambda: 0.0, {"KV cache": 0.5, "warm-up": 2.0}, lambda: next(times))
    assert set(readings.gauges) == {"start_seconds_kv_cache", "start_seconds_warm_up"}
    readings.connected()
    assert readings.gauges["start_seconds_connect"] == 0.25
    readings.connected()
    assert readings.gauges["start_seconds_connect"] == 0.25
