"""Steps that raise: one request's fault, or the worker's? Pure."""

from __future__ import annotations

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
