"""When a step on a device is expected to be nearly over."""

from __future__ import annotations

import pytest

from splitserve.engine.step.step_progress import EXPECTED, LEAD_S, LOOKS_BACK, StepForecast


class Timeline:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


def ran(forecast: StepForecast, timeline: Timeline, seconds: float, count: int = LOOKS_BACK) -> None:
    """Steps of this duration, each launched while the one before runs."""
    for _ in range(count):
        begin = timeline.now
        forecast.begin(begin - 0.001)
        forecast.sleep_until_nearly_over()
        timeline.now = max(timeline.now, begin + seconds)
        forecast.end()


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def forecast(timeline: Timeline) -> StepForecast:
    return StepForecast(timeline.sleep, lambda: timeline.now)


def test_the_first_steps_say_nothing(forecast: StepForecast, timeline: Timeline) -> None:
    ran(forecast, timeline, 0.03)
    assert timeline.slept == []


def test_a_step_is_nearly_over_shortly_before_the_last_ones_were(
    forecast: StepForecast, timeline: Timeline
) -> None:
    ran(forecast, timeline, 0.03)
    forecast.begin(timeline.now)
    forecast.sleep_until_nearly_over()
    assert timeline.slept == [pytest.approx(EXPECTED * 0.03 - LEAD_S)]


def test_what_was_launched_ahead_begins_when_the_step_before_has_ended(
    forecast: StepForecast, timeline: Timeline
) -> None:
    ran(forecast, timeline, 0.03)
    forecast.begin(timeline.now - 0.02)  # launched while the last one ran
    timeline.now += 0.01  # and looked at late
    forecast.sleep_until_nearly_over()
    assert timeline.slept == [pytest.approx(EXPECTED * 0.03 - LEAD_S - 0.01)]


def test_the_shortest_of_the_last_steps_counts(forecast: StepForecast, timeline: Timeline) -> None:
    for seconds in (0.04, 0.03, 0.05, 0.04):
        ran(forecast, timeline, seconds, count=1)
    forecast.begin(timeline.now)
    forecast.sleep_until_nearly_over()
    assert timeline.slept == [pytest.approx(EXPECTED * 0.03 - LEAD_S)]


def test_after_a_step_that_was_over_too_soon_the_last_ones_say_nothing(
    forecast: StepForecast, timeline: Timeline
) -> None:
    ran(forecast, timeline, 0.03)
    ran(forecast, timeline, 0.012, count=LOOKS_BACK + 2)
    assert timeline.slept == [pytest.approx(EXPECTED * seconds - LEAD_S) for seconds in (0.03, 0.012)]


def test_short_steps_are_followed_at_once(forecast: StepForecast, timeline: Timeline) -> None:
    ran(forecast, timeline, LEAD_S, count=2 * LOOKS_BACK)
    assert timeline.slept == []
