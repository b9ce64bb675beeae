"""How long a request stands still when it has to be dispatched again, stage by stage. Pure; times in seconds of a monotonic clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

REMEMBERED = 512


@dataclass(slots=True)
class Recovery:
    """From the moment an attempt is known to be lost to the request's next token.

    noticed ... dispatched: waits for a worker with room, the first ``absent_s`` of it while a role had none at all; then ``queue_s`` on the
    prefill worker, and ``prefill_s`` of computing.
    """

    request_id: str
    reason: str  # why the first of the attempts in between was lost
    noticed: float
    num_tokens: int  # prompt and output to be computed again
    dispatched: float = 0.0  # the attempt that brought the token
    absent_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    num_attempts: int = 0
    token: float = 0.0


class RecoveryLog:
    """The latest recoveries, and their sums."""

    def __init__(self) -> None:
        self.latest: deque[Recovery] = deque(maxlen=REMEMBERED)
        self.count = 0
        self.seconds = 0.0

    def complete(self, recovery: Recovery, now: float) -> None:
        """The next token is here."""
        recovery.token = now
        self.latest.append(recovery)
        self.count += 1
        self.seconds += now - recovery.noticed
