"""How long a prompt waits for cached blocks of another worker: as long as they would take to compute. Pure;
times in seconds.

Blocks that come later are computed, so that a slow way costs each prompt its wait. After three in a row no
prompt waits for a while; then one tries again."""

from __future__ import annotations

UNSEEN_S = 1.0  # before the speed is known
MAX_S = 10.0  # they may have to be computed after it
MAX_LATE, PAUSE_S = 3, 30.0


class PrefixWaits:
    """``num_late``: prompts that have waited in vain."""

    def __init__(self) -> None:
        self.num_late = 0
        self._num_in_a_row, self._late_at = 0, 0.0

    def seconds(self, num_tokens: int, tokens_per_s: float | None, now: float) -> float:
        """Return how long a prompt waits for this much. ``tokens_per_s``: of this worker; None: not known."""
        if not num_tokens or (self._num_in_a_row >= MAX_LATE and now - self._late_at < PAUSE_S):
            return 0.0
        return min(MAX_S, num_tokens / tokens_per_s) if tokens_per_s else UNSEEN_S

    def came(self) -> None:
        """Note that one came in time."""
        self._num_in_a_row = 0

    def late(self, now: float) -> None:
        """Note that one did not."""
        self.num_late += 1
        self._num_in_a_row, self._late_at = self._num_in_a_row + 1, now
