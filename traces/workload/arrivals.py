"""Arrival times: a renewal process with gamma gaps, run through a rate that may change over time.

Gaps have mean 1 and coefficient of variation ``cv`` (shape 1/cv**2; cv 1: exponential gaps, Poisson arrivals)
in *operational time*, which passes at the momentary rate: an arrival at operational time tau happens when the
rate's integral reaches tau (the time-rescaling theorem read backwards, Brown et al. 2002). So clumps (cv) and
change over time (profile) are two things, and both can be fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

CHUNK = 4096
DIURNAL_STEPS = 288  # five minutes of a day


class Arrivals(BaseModel):
    """Rates are in requests (of workloads with sessions: first turns) per second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rate: float = Field(gt=0, le=1e6, description="Mean rate over a whole profile.")
    cv: float = Field(
        default=1.0,
        ge=0,
        le=1000,
        description="Coefficient of variation of the gaps at a constant rate; 1: Poisson.",
    )
    profile: tuple[float, ...] = Field(
        default=(1.0,), min_length=1, max_length=100_000, description="Relative rates of the steps."
    )
    step_s: float = Field(default=86_400.0, gt=0, le=1e9, description="Seconds of one step of the profile.")

    @model_validator(mode="after")
    def _can_arrive(self) -> Arrivals:
        if not all(0 <= rate < math.inf for rate in self.profile) or not sum(self.profile):
            raise ValueError("a profile's rates must be 0 or more, and one of them above 0")
        return self

    @property
    def period_s(self) -> float:
        """Seconds after which the profile begins again."""
        return self.step_s * len(self.profile)


def diurnal_profile(amplitude: float) -> tuple[float, ...]:
    """``1 + amplitude * sin``, one period from the mean upwards."""
    middles = (np.arange(DIURNAL_STEPS) + 0.5) / DIURNAL_STEPS
    return tuple((1 + amplitude * np.sin(2 * np.pi * middles)).tolist())


def draw_arrivals(arrivals: Arrivals, rng: np.random.Generator) -> Iterator[float]:
    """Seconds since the start, without end."""
    clock = OperationalClock(arrivals)
    now = 0.0
    while True:
        if arrivals.cv:
            shape = arrivals.cv**-2
            gaps = rng.gamma(shape, 1 / shape, CHUNK)
        else:
            gaps = np.ones(CHUNK)
        times = now + np.cumsum(gaps)
        now = float(times[-1])
        yield from clock.seconds(times).tolist()


class OperationalClock:
    """Seconds to operational time and back. Operational time is the expected number of arrivals so far."""

    def __init__(self, arrivals: Arrivals) -> None:
        profile = np.array(arrivals.profile)
        expected = profile * (arrivals.rate * arrivals.step_s / profile.mean())  # arrivals in each step
        self.period_s = arrivals.period_s
        self.edges_s = np.arange(len(profile) + 1) * arrivals.step_s
        self.at_edges = np.concatenate([[0.0], np.cumsum(expected)])

    def seconds(self, operational: NDArray[np.float64]) -> NDArray[np.float64]:
        """When the operational times are reached."""
        periods, rest = np.divmod(operational, self.at_edges[-1])
        return np.asarray(
            periods * self.period_s + np.interp(rest, self.at_edges, self.edges_s), dtype=np.float64
        )

    def operational_at(self, seconds: float) -> float:
        """The other way round."""
        periods, rest = divmod(seconds, self.period_s)
        return float(periods * self.at_edges[-1] + np.interp(rest, self.edges_s, self.at_edges))
