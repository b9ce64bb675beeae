"""Requests that kill the workers that run them: at once, or again and again after a few steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.coordinator.lifecycle.limits import LifecycleLimits

if TYPE_CHECKING:
    from simulation.worker_process import WorkerProcess
    from simulation.worker_role import WorkerRole
    from simulation.world import World

    from splitserve.transport.messages.messages import PeerId
    from splitserve.worker.steps import RunningStep

FUSES = (0, 1, 16)
"""Steps on one worker that go well. After none a prefill worker dies, after one a decode worker (or a prefill
worker, in the second chunk); sixteen, and the token that the prefill worker made, are progress each time."""
MOST_DEATHS = {
    0: LifecycleLimits().max_deaths,
    1: LifecycleLimits().max_deaths,
    16: 2 * LifecycleLimits().max_deaths,
}
"""Workers that each poison may cost where nothing else goes wrong: sixteen tokens are progress until this
many have died of it."""


@dataclass(slots=True)
class PoisonousRequest:
    fuse: int
    num_steps: Counter[PeerId] = field(default_factory=Counter)  # by worker
    num_deaths: int = 0


class Poison:
    """All poisonous requests of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.requests: dict[str, PoisonousRequest] = {}

    def fells(self, process: WorkerProcess, step: RunningStep) -> bool:
        """Whether the process dies of this step: it is dead then."""
        if not self.requests:
            return False
        parts = ((process.roles.get("decode"), step.sequences), (process.roles.get("prefill"), step.prompts))
        computed = [(role, name) for role, part in parts if role and part for name in part.request_ids]
        for worker, request_id in computed:
            request = self.requests.get(request_id)
            if request is not None and self._is_deadly(request, worker):
                request.num_deaths += 1
                self._check(request_id, request)
                self._world.counts["deaths by poison"] += 1
                self._world.kill(process)
                return True
        return False

    @staticmethod
    def _is_deadly(request: PoisonousRequest, worker: WorkerRole) -> bool:
        request.num_steps[worker.id] += 1
        return request.num_steps[worker.id] > request.fuse

    def _check(self, request_id: str, request: PoisonousRequest) -> None:
        """Other faults may hide the cause of deaths, and of two poisonous ones one may be taken for the
        other: then a few more are fair."""
        alone = self._world.is_merely_poisoned and len(self.requests) == 1
        most = MOST_DEATHS[request.fuse] + (0 if alone else MOST_DEATHS[0])
        if request.num_deaths > most:
            self._world.violated(f"{request_id}: has killed {request.num_deaths} workers")
