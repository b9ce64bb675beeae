"""Predict when the running step is nearly over, from the times of the last ones.

A CUDA graph does not report its progress, but decode steps change little from one to the next. The next step
is made late, so that sequences that arrive meanwhile take part, yet early enough that the device does not
wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

LEAD_S = 0.003
"""Before a step's expected end: a step is made and launched in about a millisecond."""
EXPECTED = 0.9
"""Share of the shortest of the last steps that a step usually takes at least."""
LOOKS_BACK = 4
OVERSLEPT_S = 1e-4
"""A step that ends so soon after its ``sleep_until_nearly_over`` had ended before."""


class StepForecast:
    """``sleep`` and ``clock``: of the machine, but in tests. To be used from one thread."""

    def __init__(
        self, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sleep, self._clock = sleep, clock
        self._durations: deque[float] = deque(maxlen=LOOKS_BACK)
        self._began_at = self._ended_at = self._slept_until = float("-inf")

    def begin(self, launched_at: float) -> None:
        """A step that was launched at this time runs, or did as soon as the one before it had ended."""
        self._began_at = max(launched_at, self._ended_at)

    def end(self) -> None:
        """Note the end of the step. Without a wait it ended some time ago: then the last steps predict
        nothing."""
        self._ended_at = self._clock()
        if self._ended_at - self._slept_until < OVERSLEPT_S:
            self._durations.clear()
        else:
            self._durations.append(self._ended_at - self._began_at)

    def sleep_until_nearly_over(self) -> None:
        """Not at all where steps are too short for it, or too few are known."""
        if len(self._durations) < LOOKS_BACK:
            return
        left = self._began_at + EXPECTED * min(self._durations) - LEAD_S - self._clock()
        if left > 0:
            self._sleep(left)
            self._slept_until = self._clock()
