"""Counts of retries, recoveries, missed deadlines and failures, for readiness and metrics. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_RECOVERIES, MAX_RETRIES = 512, 20  # remembered
FAILURES_IN_A_ROW = 3
"""After this many in one stage the system is not ready. A single client's request fails less often."""
MAX_REASON = 300  # characters shown


@dataclass(slots=True)
class Recovery:
    """The pause of a request that was dispatched again: from the lost attempt to the next token.

    Between ``noticed`` and ``dispatched`` it waited for workers with room, ``absent_s`` of it while a role
    had no worker. Then it waited ``queue_s`` on the prefill worker, which computed for ``prefill_s``. Times
    in seconds, of a monotonic clock.
    """

    request_id: str
    reason: str  # why the first attempt was lost
    noticed: float
    num_tokens: int  # prompt and output tokens that are computed again
    dispatched: float = 0.0  # the attempt that brought the token
    absent_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    num_attempts: int = 0
    token: float = 0.0


class FailingStage:
    """Notices that the last requests all failed in the same stage, though workers of both roles are here."""

    def __init__(self) -> None:
        self._stage, self._reason, self._count = "", "", 0

    def failed(self, stage: str, reason: str) -> None:
        """Count a request that failed through no fault of its client."""
        self._count = self._count + 1 if stage == self._stage else 1
        self._stage, self._reason = stage, reason

    def passed(self, stage: str) -> None:
        """Count a request that ended well in this stage."""
        if stage == "decode" or self._stage in ("queue", stage, "prefill"):
            self._count = 0

    def __str__(self) -> str:
        """A sentence without its full stop; empty while all is well."""
        if self._count < FAILURES_IN_A_ROW:
            return ""
        is_public = "/" not in self._reason  # shows no path
        reason = self._reason[:MAX_REASON] if is_public else "see the log"
        return f"the last {self._count} requests failed in the stage {self._stage}: {reason}"


class Outcomes:
    """Counts since the start, and the newest examples."""

    def __init__(self) -> None:
        self.proven = False  # a request has gone prefill, handoff, decode
        self.failing_stage = FailingStage()
        self.num_retries = 0
        self.last_retries: deque[str] = deque(maxlen=MAX_RETRIES)  # "request in stage: reason"
        self.num_recoveries = 0
        self.recovery_s = 0.0
        self.last_recoveries: deque[Recovery] = deque(maxlen=MAX_RECOVERIES)
        self.num_moved = 0  # sequences, between decode workers
        self.num_moves_given_up = 0
        self.num_resumed = 0  # answers that a worker had kept
        self.num_pulls = 0  # of cached blocks, ordered
        self.num_borrowed_prompts = 0  # computed by decode workers
        self.num_borrowed_sequences = 0  # kept by prefill workers
        self.num_deadlines: dict[str, int] = dict.fromkeys(("queue", "prefill", "handoff", "decode"), 0)

    @property
    def failing(self) -> str:
        """In which stage the last requests all failed, and why; empty where they did not."""
        return str(self.failing_stage)

    def finished(self, stage: str) -> None:
        """Count a request that ended well in this stage."""
        self.proven = self.proven or stage == "decode"
        self.failing_stage.passed(stage)

    def retried(self, request_id: str, stage: str, reason: str) -> None:
        """Count a request that is dispatched again."""
        self.num_retries += 1
        self.last_retries.append(f"{request_id} in {stage}: {reason}")

    def recovered(self, recovery: Recovery, now: float) -> None:
        """Count a recovery: its request has a new token."""
        recovery.token = now
        self.last_recoveries.append(recovery)
        self.num_recoveries += 1
        self.recovery_s += now - recovery.noticed
