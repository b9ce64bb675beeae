"""Virtual token counters: which of several waiting members is served next. Pure.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), Algorithm 2 with weights. Each
member has a counter of the service it got, divided by its weight; the member with the least is next. A member
that comes to wait after a pause is lifted to the least of those that wait: idle time earns no credit. Between
two members that both wait all the time, the service per weight differs by at most one batch's worth, however
much more one of them asks for, so none starves.
"""

from __future__ import annotations

from collections.abc import Collection


class Shares:
    """Counters by member's name; an unknown name has received nothing."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._floor = 0.0  # the counter of the member that was last served to the end of its queue

    def counter(self, name: str) -> float:
        """Return the service that the member got, over its weight."""
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
        self._floor = self._counters[name] = max(self._counters.get(name, 0.0), self._floor) + service

    def charge(self, name: str, service: float) -> None:
        """Count service, over the member's weight; negative: less than was charged before."""
        self._counters[name] = self.counter(name) + service
