"""The process of a role that is over, in a process that has another one: its sending end goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.process import Process
from simulation.worker_process import TICK_S, WorkerProcess

from splitserve.transport.handoff.retiring_end import RetiringEnd

if TYPE_CHECKING:
    from simulation.flexible_process import FlexibleProcess


class RetiringRole(Process):
    """Under the ended worker's name and clock."""

    def __init__(self, worker: WorkerProcess, process: FlexibleProcess) -> None:
        super().__init__(worker.world, worker.name)
        self._clock_offset, self._clock_rate = worker._clock_offset, worker._clock_rate
        self.id, self._process = worker.id, process
        worker.network.successor = self
        self._end = RetiringEnd(worker.sending, worker.sender)
        self._tick()

    def poll(self) -> None:
        self._end.turn(self.now)
        if self._end.is_over:
            self._end.close()
            self.die()
            self._process.retiring.remove(self)

    def _tick(self) -> None:
        self.after(TICK_S, self._tick)
        self.after(0.0, self.poll)
