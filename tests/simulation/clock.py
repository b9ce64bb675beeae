"""Virtual time: events in their order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Event = Callable[..., None]


class EventQueue:
    """What happens next. ``now`` is the world's time in seconds; two events of one instant run in the order
    they were put in."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Event, tuple[Any, ...]]] = []

    def after(self, delay: float, event: Event, *args: Any) -> None:
        self.num_events += 1
        heapq.heappush(self._heap, (self.now + delay, self.num_events, event, args))

    def at(self, time: float, event: Event, *args: Any) -> None:
        self.num_events += 1
        heapq.heappush(self._heap, (time, self.num_events, event, args))

    def run(self, until: float) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, event, args = pop(heap)
            event(*args)
        self.now = until

    def run_until(self, condition: Callable[[], bool], at_most: float) -> bool:
        """Looks at the condition every quarter of a second, for ``at_most`` seconds. False: it did not come
        true."""
        end = self.now + at_most
        while not condition():
            if self.now >= end:
                return False
            self.run(self.now + 0.25)
        return True
