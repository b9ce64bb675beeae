"""A process that changes its role while it runs: one memory and block manager, a worker of either role over
them, or for a while both. Or for good both: a mixed one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from simulation.memory import Memory
from simulation.process import Process
from simulation.retiring_role import RetiringRole
from simulation.watched_blocks import WatchedBlocks
from simulation.worker_process import BLOCK_SIZE, WorkerProcess

from splitserve.transport.messages.messages import Role
from splitserve.worker.roles import worker_name

if TYPE_CHECKING:
    from simulation.world import World


class FlexibleProcess:
    """To everybody else each of its roles is a worker of its own, named after it."""

    def __init__(
        self, world: World, name: str, host: str, num_blocks: int, role: Role | Literal["mixed"]
    ) -> None:
        self.world, self.name, self.host, self.num_blocks = world, name, host, num_blocks
        self.alive, self.leaving = True, False
        self.pid = world.next_number()
        self.next_incarnation = world.hosts[host].incarnations()
        self.memory = Memory(num_blocks, BLOCK_SIZE, world.scenario.cluster.window)
        self.writers: dict[Process, Counter[int]] = {}
        self.blocks = WatchedBlocks(num_blocks, self)
        self.roles: dict[Role, WorkerProcess] = {}
        self.retiring: list[RetiringRole] = []
        self.mixed = role == "mixed"
        self.latest: Role | Literal["mixed"] = role
        if role == "mixed":
            self.begin("decode")
            self.begin("prefill")
        else:
            self.begin(role)

    def begin(self, role: Role) -> bool:
        """Is of this role from now on. False: it has not quite ended being so, or is to end."""
        if self.leaving:
            return False
        if role in self.roles:
            return not self.roles[role].core.drains
        worker = self.world.kinds[role](
            self.world, worker_name(self.name, role), self.host, self.num_blocks, self
        )
        self.roles[role] = self.world.workers[worker.name] = worker
        self.latest = "mixed" if self.mixed else role
        return True

    def hands_to_itself(self, decode_worker: str) -> bool:
        """Whether the worker of this name generates here for the prompts that are computed here."""
        return self.mixed and decode_worker == worker_name(self.name, "decode")

    def num_growing_blocks(self) -> int:
        """To be left to the sequences that run here."""
        decode = self.roles.get("decode")
        return decode.core.room()[1] if decode is not None else 0

    def end(self, worker: WorkerProcess) -> None:
        """Nothing is left of this role; without any the process ends."""
        if len(self.roles) > 1 and not self.leaving:
            self.retiring.append(RetiringRole(worker, self))
        self._drop(worker)
        if not self.roles:
            self.world.kill_process(self)

    def die(self) -> None:
        self.alive = False
        for worker in list(self.roles.values()):
            self._drop(worker)
        for role in self.retiring:
            role.die()

    def freeze(self, seconds: float) -> None:
        for worker in (*self.roles.values(), *self.retiring):
            Process.freeze(worker, seconds)

    def tell_to_leave(self) -> None:
        self.leaving = True
        for worker in self.roles.values():
            worker.told_to_leave = True

    def block_tables(self) -> Iterator[Sequence[int]]:
        """Of all its roles."""
        for worker in self.roles.values():
            yield from worker.block_tables()

    def _drop(self, worker: WorkerProcess) -> None:
        worker.die()
        del self.roles[worker.role], self.world.workers[worker.name]
