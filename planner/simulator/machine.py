"""One device and the process on it, which starts again after each end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .cluster import Pool
from .device import Device
from .process import SimulatedProcess, SimulatedRole
from .timeline import WorkerSample


@dataclass(slots=True)
class SimulatedMachine:
    """``new_device``: returns the device as a process finds it."""

    name: str
    pool: Pool
    new_device: Callable[[], Device]
    device: Device
    process: SimulatedProcess | None = None  # None: it is down
    _busy_s: float = 0.0  # when it was last sampled

    @property
    def roles(self) -> list[SimulatedRole]:
        """The roles that it plays now."""
        return list(self.process.roles.values()) if self.process is not None else []

    @property
    def num_bytes_out(self) -> int:
        """Bytes of KV blocks that left its process."""
        return self.process.link.num_bytes_out if self.process is not None else 0

    @property
    def num_rows(self) -> int:
        """Rows in the timeline."""
        return 2 if self.pool.role == "colocated" or self.pool.borrow else 1

    def sample(self, interval_s: float) -> list[WorkerSample]:
        """Sample each worker; ``interval_s``: seconds since the last call."""
        busy = min(max((self.device.busy_seconds - self._busy_s) / interval_s, 0.0), 1.0)
        self._busy_s = self.device.busy_seconds
        return [_sample(role, busy) for role in self.roles[-self.num_rows :]] or [
            WorkerSample(0, 0, 0.0, 0.0, 0.0)
        ] * self.num_rows


def _sample(role: SimulatedRole, busy: float) -> WorkerSample:
    blocks, load = role.core.blocks, role.core.load()
    used, cached = blocks.num_used / blocks.num_blocks, blocks.num_cached / blocks.num_blocks
    return WorkerSample(load.num_running, load.num_waiting, used, cached, busy)
