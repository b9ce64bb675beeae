"""Shares of service by the virtual counters that ``request_queue.py`` describes. Pure."""

from __future__ import annotations

from collections.abc import Collection


class Shares:
    """Counts the service of each member over its weight; the member with the least is served next.

    A member that comes to wait after a pause is lifted to the least of those that wait: idle time earns no
    credit.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}  # by the member's name
        self._floor = 0.0  # the counter of the member that was last served to the end of its queue

    def counter(self, name: str) -> float:
        """Return the member's service over its weight; 0.0 for an unknown name."""
        return self._counters.get(name, 0.0)

    def join(self, name: str, waiting: Collection[str]) -> None:
        """Begin to wait. ``waiting``: the other members that wait."""
        least = min(map(self.counter, waiting), default=self._floor)
        self._counters[name] = max(self.counter(name), least)

    def leave(self, name: str) -> None:
        """End to wait."""
        self._floor = self.counter(name)

    def serve_at_once(self, name: str, service: float) -> None:
        """Join, be charged and leave, while no member waits."""
        self._floor = self._counters[name] = max(self.counter(name), self._floor) + service

    def charge(self, name: str, service: float) -> None:
        """Add service over the member's weight; a negative one corrects an earlier charge."""
        self._counters[name] = self.counter(name) + service
