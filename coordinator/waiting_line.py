"""The requests that wait in the coordinator for workers with room: by priority, then by arrival. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from math import inf

from .flight import Flight

LOOK_AHEAD = 32
"""So many requests at the head are tried when there may be room."""


class WaitingLine:
    """A sorted line; who does not fit is overtaken, but not for long."""

    def __init__(self, starving_s: float) -> None:
        """``starving_s``: who has waited so long is not overtaken any more."""
        self._starving_s = starving_s
        self._entries: list[tuple[int, float, int, Flight, int]] = []  # priority, arrival, tie-break; and how many tokens
        self._num_joined = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Flight]:
        return iter([entry[3] for entry in self._entries])

    def join(self, flight: Flight) -> None:
        """One more waits. A request that comes back keeps the place of its arrival."""
        self._num_joined += 1
        bisect.insort(self._entries, (flight.request.priority, flight.request.arrival, self._num_joined, flight, flight.num_tokens))

    def leave(self, flight: Flight) -> None:
        """It waits no more."""
        self._entries = [entry for entry in self._entries if entry[3] is not flight]

    def serve(self, place: Callable[[Flight], bool], now: float) -> None:
        """Places from the head of the line whatever finds room."""
        i, too_long = 0, inf  # where a prompt finds no room, no longer one does
        while i < min(len(self._entries), LOOK_AHEAD):
            flight, num_tokens = self._entries[i][3:]
            if now < flight.not_before:
                i += 1
            elif num_tokens < too_long and place(flight):
                del self._entries[i]
            elif now - flight.request.arrival > self._starving_s and not flight.suspect:
                return
            else:
                too_long = too_long if flight.suspect else min(too_long, num_tokens)
                i += 1
