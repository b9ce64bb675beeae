"""Who is served next among those that wait: virtual token counters. Pure.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), Algorithm 2 with weights. Each member has a counter of the
service it got, divided by its weight; the least is next. Who comes to wait after a pause is lifted to the least of those that wait: idle
time earns no credit. Between any two members that both wait all the time the service per weight differs by at most
one batch's worth, however much more one of them asks for; so nobody starves.
"""

from __future__ import annotations

from collections.abc import Collection


class Shares:
    """Counters by member's name; a name that was never heard of has received nothing."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._floor = 0.0  # the counter of who was last served to the end of its queue

    def counter(self, name: str) -> float:
        return self._counters.get(name, 0.0)

    def joins(self, name: str, waiting: Collection[str]) -> None:
        """It had nothing waiting and now has; ``waiting``: who else has."""
        least = min(map(self.counter, waiting), default=self._floor)
        self._counters[name] = max(self.counter(name), least)

    def leaves(self, name: str) -> None:
        """It has nothing waiting any more."""
        self._floor = self.counter(name)

    def passes(self, name: str, service: float) -> None:
        """It got so much at once while nobody waited: it joins, is charged and leaves."""
        self._floor = self._counters[name] = max(self._counters.get(name, 0.0), self._floor) + service

    def charge(self, name: str, service: float) -> None:
        """It got so much service, over its weight; negative: less than was charged before."""
        self._counters[name] = self.counter(name) + service
