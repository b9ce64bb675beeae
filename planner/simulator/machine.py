"""One device and the workers on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...worker.roles import RoleHost
from .cluster import Pool
from .device import Device, Noise
from .host import Host
from .timeline import WorkerSample
from .worker_shell import WorkerShell


@dataclass(slots=True)
class SimulatedMachine:
    """The process ``name``, in one role or in both."""

    name: str
    pool: Pool
    device: Device
    noise: Noise
    beside: Host | None  # whose other workers slow its steps; None: no worker does
    shells: list[WorkerShell] = field(default_factory=list)
    host: RoleHost | None = None  # where its role can change, or it has both
    _busy_s: float = 0.0  # when it was last sampled

    @property
    def num_rows(self) -> int:
        """Rows in the timeline."""
        return 2 if self.pool.role == "colocated" else 1

    def remove(self, shell: WorkerShell) -> None:
        self.shells.remove(shell)
        self.device.let_go(shell)

    def sample(self, interval_s: float) -> list[WorkerSample]:
        """Sample each worker; ``interval_s``: seconds since the last call."""
        busy = min(max((self.device.busy_s - self._busy_s) / interval_s, 0.0), 1.0)
        self._busy_s = self.device.busy_s
        shown = self.shells[-self.num_rows :]
        return [_sample(shell, busy) for shell in shown] or [
            WorkerSample(0, 0, 0.0, 0.0, 0.0)
        ] * self.num_rows


def _sample(shell: WorkerShell, busy: float) -> WorkerSample:
    blocks, load = shell.core.blocks, shell.core.load()
    used, cached = blocks.num_used / blocks.num_blocks, blocks.num_cached / blocks.num_blocks
    return WorkerSample(load.num_running, load.num_waiting, used, cached, busy)
