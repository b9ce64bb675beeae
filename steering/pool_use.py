"""How much of the workers of a role is in use, as they report it. Pure; times in seconds.

prefill  the share of looks at which it had prompts to compute
decode   the share of its rows or of its KV blocks that sequences hold, whichever is more
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..coordinator.lifecycle.snapshot import WorkerState
from ..transport.messages.messages import Role

ROLES: tuple[Role, ...] = ("prefill", "decode")


class PoolUse:
    """``look`` every second: the mean over the workers of each role and over the looks of the last
    ``over_s``."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._looks: dict[Role, deque[tuple[float, float]]] = {role: deque() for role in ROLES}

    def look(self, workers: Iterable[WorkerState], now: float) -> dict[Role, float]:
        """0 to 1; a role that has no worker is not in it."""
        of_role: dict[Role, list[float]] = {role: [] for role in ROLES}
        for worker in workers:
            if not worker.is_draining:
                of_role[worker.role].append(_in_use(worker))
        return {role: self._mean(role, now, sum(uses) / len(uses)) for role, uses in of_role.items() if uses}

    def _mean(self, role: Role, now: float, use: float) -> float:
        looks = self._looks[role]
        looks.append((now, use))
        while looks[0][0] <= now - self._over_s:
            looks.popleft()
        return sum(use for _, use in looks) / len(looks)


def _in_use(worker: WorkerState) -> float:
    load = worker.load
    if load is None:
        return 0.0
    if worker.role == "prefill":
        return float(load.busy)
    return min(1.0, max(load.num_running / worker.max_num_seqs, load.blocks_used / worker.num_blocks))
