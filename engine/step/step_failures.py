"""Steps that raise (one request's fault, or the worker's?) or run out of memory. Pure."""

from __future__ import annotations

from collections.abc import Callable

BROKEN_AFTER = 3


class StepFailures:
    """Counts requests that failed alone in a step, without a good step between.

    Such a request is returned and retried elsewhere. Several in a row mean that the worker is broken, for
    example that its GPU's context is lost."""

    def __init__(self) -> None:
        self._requests: set[str] = set()

    def book(self, request_id: str) -> None:
        """It was alone in a step that raised."""
        self._requests.add(request_id)

    def good_step(self) -> None:
        """One has run."""
        if self._requests:
            self._requests.clear()

    @property
    def means_broken(self) -> bool:
        """Whether only another process helps."""
        return len(self._requests) >= BROKEN_AFTER


class SizeLimit:
    """How large a step may be: less for a while after one that ran out of memory."""

    def __init__(self, most: int, good_steps: int, larger: Callable[[int], int]) -> None:
        """``larger``: the limit after ``good_steps`` good steps at this one."""
        self.now = self._most = most
        self._good_steps, self._larger = good_steps, larger
        self._num_good = 0

    def lower(self, limit: int) -> None:
        """A step ran out of memory."""
        self.now, self._num_good = limit, 0

    def good_step(self) -> None:
        """A step had enough."""
        if self.now < self._most:
            self._num_good += 1
            if self._num_good == self._good_steps:
                self.now, self._num_good = min(self._larger(self.now), self._most), 0
