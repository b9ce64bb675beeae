"""What goes on of a role that is over, in a process that has another one: it is said to whoever may hold blocks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.process import Process
from simulation.worker_process import TICK_S, WorkerProcess

if TYPE_CHECKING:
    from simulation.flexible_process import FlexibleProcess

FORGOTTEN_S = 5.0
"""A decode worker that has been away for so long is gone for good."""


class RetiringRole(Process):
    """The ended worker's sending end, under its name and clock."""

    def __init__(self, worker: WorkerProcess, process: FlexibleProcess) -> None:
        super().__init__(worker.world, worker.name)
        self._clock_offset, self._clock_rate = worker._clock_offset, worker._clock_rate
        self.id = worker.id
        self._process, self._end, self._sender = process, worker.sending, worker.sending.sender
        self._seen = dict.fromkeys((peer for peer, _ in self._end.channels), self.now)
        self._end.stop_writing(self)
        self._sender.retire()
        self.after(TICK_S, self._tick)

    def turn(self) -> None:
        for action in self._sender.take():
            self.run(self._end.carry_out, action)
        if self._sender.has_retired:
            self.die()
            self._process.retiring.remove(self)

    def _tick(self) -> None:
        self.after(TICK_S, self._tick)
        for worker_id, seen in self._seen.items():
            if worker_id in self.world.workers:
                self._seen[worker_id] = self.now
            elif self.now - seen > FORGOTTEN_S:
                self._sender.peer_gone((worker_id, 0))
        self._sender.tick(self.now)
        self.turn()
