"""Prefill steps that have been made and are not booked yet. Pure."""

from __future__ import annotations


class PendingSteps:
    """They run one after the other, in the order in which they were made."""

    def __init__(self) -> None:
        self._num = 0
        self._began = 0.0  # the oldest of them
        self.are_lost = False  # one has failed: those made after it are skipped, and none is made until then

    def begin(self, now: float) -> None:
        """One more has been made."""
        if not self._num:
            self._began = now
        self._num += 1

    def end(self, now: float) -> float:
        """The oldest has run. Returns for how many seconds; the next, if there is one, runs from now on."""
        seconds, self._began = max(0.0, now - self._began), now
        self.skip()
        return seconds

    def fail(self) -> None:
        """The oldest has failed."""
        self.are_lost = True
        self.skip()

    def skip(self) -> None:
        """The oldest is to be booked no more."""
        self._num -= 1
        self.are_lost = self.are_lost and self._num > 0
