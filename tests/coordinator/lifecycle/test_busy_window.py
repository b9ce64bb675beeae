"""The share of time in which a worker computes, from the counters that it reports."""

from __future__ import annotations

import pytest

from splitserve.coordinator.lifecycle.worker import BusyWindow


def report(window: BusyWindow, uptime: float, busy: float) -> None:
    window.report({"uptime_seconds": uptime, "busy_seconds": busy})


def test_it_is_of_the_last_seconds_only() -> None:
    window = BusyWindow()
    assert window.share is None
    for tenth in range(1000):
        report(window, tenth / 10, 0.0)
    assert window.share == 0.0
    for tenth in range(1000, 1201):
        report(window, tenth / 10, (tenth - 1000) / 40)
    assert window.share == pytest.approx(0.25, abs=0.02)


def test_a_worker_that_does_not_report_it_has_none() -> None:
    window = BusyWindow()
    window.report({"output_tokens": 5.0})
    report(window, 3.0, 1.0)
    assert window.share is None, "one report says nothing of a rate"
    report(window, 4.0, 2.0)
    assert window.share == 1.0, "the busiest there is"
