"""Notices that requests can not be served though workers of both roles are here: the last ones all failed in the same stage. Pure."""

from __future__ import annotations

FAILURES = 3
"""In a row, and nothing is ready until a request passes that stage. One client's request alone does not make so many."""
MOST_SHOWN = 300  # characters


class FailingStage:
    """``failed`` and ``passed`` are called as requests end."""

    def __init__(self) -> None:
        self._stage, self._reason, self._count = "", "", 0

    def failed(self, stage: str, reason: str) -> None:
        """A request ended without what it asked for, by no fault or wish of its client."""
        self._count = self._count + 1 if stage == self._stage else 1
        self._stage, self._reason = stage, reason

    def passed(self, stage: str) -> None:
        """A request ended well, in this stage."""
        if stage == "decode" or self._stage in ("queue", stage, "prefill"):
            self._count = 0

    def __str__(self) -> str:
        """A sentence without its full stop; empty where all is well."""
        if self._count < FAILURES:
            return ""
        reason = self._reason[:MOST_SHOWN] if "/" not in self._reason else "see the log"  # anybody may read it: no path
        return f"the last {self._count} requests failed in the stage {self._stage}: {reason}"
