"""Watts of a worker's GPU, idle, in prefill and in decode steps, from the driver (NVML)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from ...engine.latency_profile import Power

SECONDS = 3.0  # of each; NVML's power is itself an average over up to a second
EVERY_S = 0.1


class Meter(Protocol):
    """The driver's last readings; it may omit some."""

    gauges: Mapping[str, float]

    def sample(self) -> None: ...


def measure_power(
    meter: Meter,
    prefill: Callable[[], object],
    decode: Callable[[], object],
    clock: Callable[[], float] = time.monotonic,
) -> Power | None:
    """Measure the power. ``prefill`` and ``decode`` run one full step. None if the driver does not report
    power."""
    watts = [_watts(meter, work, clock) for work in (lambda: time.sleep(EVERY_S), prefill, decode)]
    idle, of_prefill, of_decode = watts
    if idle is None or of_prefill is None or of_decode is None:
        return None
    return Power(idle_w=idle, prefill_w=of_prefill, decode_w=of_decode)


def _watts(meter: Meter, work: Callable[[], object], clock: Callable[[], float]) -> float | None:
    """Mean watts while ``work`` is repeated, without the first third, which still averages the time
    before."""
    began, asked, readings = clock(), clock(), []
    while (now := clock()) < began + SECONDS:
        work()
        if now - asked >= EVERY_S and now - began > SECONDS / 3:
            asked = now
            meter.sample()
            if (watts := meter.gauges.get("gpu_power_watts")) is None:
                return None
            readings.append(watts)
    return sum(readings) / len(readings) if readings else None
