"""Steps that raise: one request's fault, or the worker's? Pure."""

from __future__ import annotations

BROKEN_AFTER = 3


class StepFailures:
    """A request that was alone in a step that raised is given back, and tried elsewhere. Where one after the
    other is, with no good step between, it is no fault of theirs: a GPU whose context is lost, say, fails
    everything, and quicker than others serve."""

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
    def say_broken(self) -> bool:
        """Whether only another process helps."""
        return len(self._requests) >= BROKEN_AFTER
