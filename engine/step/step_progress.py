"""How far the running step is: layers written, when it will be over; and the seconds that steps took. Free of
torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

LEAD_S = 0.003
"""Before a step's expected end: a step is made and launched in about a millisecond."""
EXPECTED = 0.9
"""Share of the shortest of the last steps that a step usually takes at least."""
LOOKS_BACK = 4
OVERSLEPT_S = 1e-4
"""A step that ends so soon after its ``sleep_until_nearly_over`` had ended before."""


class Mark(Protocol):
    """A place in a GPU's stream."""

    def query(self) -> bool:
        """Return whether all work before it has been done."""


class LayerProgress:
    """The progress of one step.

    The step's thread calls ``reached``, the loop all else; ``wake`` signals progress to the loop.

    On a CPU a layer that the thread has passed is written. A GPU's kernels run later than the thread: there
    an event in the stream marks it, which the loop polls while ``pending``.
    """

    def __init__(self, wake: Callable[[], None], every: int, mark: Callable[[], Mark] | None = None) -> None:
        """``every``: report when another group of this many layers is written; 0: never. ``mark``: on a GPU,
        returns a new event in the stream of the calling thread."""
        self._wake, self._every, self._mark = wake, every, mark
        self._marks: deque[tuple[int, Mark]] = deque()
        self._num_layers = self._num_groups = 0

    def reached(self, num_layers: int) -> None:
        """The step's thread has written (on a GPU: launched) the keys and values of the first ``num_layers``
        layers. A graph writes many at once."""
        if not self._every or num_layers // self._every == self._num_groups:
            return
        self._num_groups = num_layers // self._every
        if self._mark is not None:
            self._marks.append((num_layers, self._mark()))
        else:
            self._num_layers = num_layers
        self._wake()

    def num_layers(self) -> int:
        """Layers whose keys and values are final; 0 before the first."""
        while self._marks and self._marks[0][1].query():
            self._num_layers = self._marks.popleft()[0]
        return self._num_layers

    @property
    def pending(self) -> bool:
        """Ask again soon: a GPU has been given layers that it has not reached yet."""
        return bool(self._marks)


class StepForecast:
    """Predict when the running step is nearly over, from the times of the last ones.

    A CUDA graph does not report its progress, but decode steps change little from one to the next. The next
    step is made late, so that sequences that arrive meanwhile take part, yet early enough that the device
    does not wait. Used from one thread."""

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


class BusyClock:
    """Sums the seconds in which a step ran. One thread calls ``begin`` and ``end``; any thread may read
    ``seconds``."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)
        """The sum, and when the running step began: replaced together."""
        self._ended = float("-inf")

    def begin(self, at: float) -> None:
        """A step has begun, or was launched, at this time. It runs once the one before has ended."""
        self._state = self._state[0], max(at, self._ended)

    def end(self, now: float) -> None:
        """The step has ended."""
        self._state, self._ended = (self.seconds(now), None), now

    def seconds(self, now: float) -> float:
        """Seconds until now, those of the running step included."""
        total, began = self._state
        return total if began is None else total + max(0.0, now - began)
