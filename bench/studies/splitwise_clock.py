"""The virtual time of the imitation of splitwise-sim."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


class Clock:
    """Events by time alone: two of one instant come in the order that the heap happens to have. No delay: at
    once."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Event] = []

    @property
    def num_events(self) -> int:
        """Still to come, cancelled ones too."""
        return len(self._heap)

    def after(self, delay: float, action: Callable[[], None]) -> Event | None:
        if delay == 0:
            action()
            return None
        event = Event(self.now + delay, action)
        heapq.heappush(self._heap, event)
        return event

    def run(self) -> None:
        while self._heap:
            event = heapq.heappop(self._heap)
            if not event.cancelled:
                self.now = event.time
                event.action()


@dataclass(slots=True, eq=False)
class Event:
    time: float
    action: Callable[[], None]
    cancelled: bool = False

    def __lt__(self, other: Event) -> bool:
        return self.time < other.time
