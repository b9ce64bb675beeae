"""Virtual time: events in their order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Event = Callable[..., object]


class EventQueue:
    """What happens next. ``now`` is in seconds; two events of one instant run in the order in which they were
    put in."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Event, tuple[Any, ...]]] = []

    def at(self, time: float, event: Event, *args: Any) -> None:
        """At ``time``, or now if that has passed."""
        self.num_events += 1
        heappush(self._heap, (time if time > self.now else self.now, self.num_events, event, args))

    def after(self, delay: float, event: Event, *args: Any) -> None:
        self.num_events += 1
        heappush(self._heap, (self.now + delay, self.num_events, event, args))

    def run_while(self, going_on: Callable[[], object]) -> None:
        """Run events until ``going_on`` returns False (asked after every event), or none is left."""
        heap, pop = self._heap, heappop
        while heap and going_on():
            self.now, _, event, args = pop(heap)
            event(*args)
