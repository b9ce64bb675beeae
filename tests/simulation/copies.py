"""The one-sided mover that copies from device to device: its copies go on by themselves, one after the other,
while the writer's process computes, sends other messages, or stands still; they cannot be called back, and
end with that process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.movers import SharedMemorySource
from simulation.network import LATE_S

from splitserve.transport.errors import MoverError
from splitserve.transport.movers.interface import Arrival, Item

if TYPE_CHECKING:
    from simulation.worker_role import WorkerRole

PUT_S = 0.8
"""Seconds after which an unfinished copy has failed, and its writer waits for its end."""


@dataclass(slots=True, eq=False)
class Copy:
    """A put under way: layers [first, end) of ``left``."""

    target: WorkerRole
    lease: int
    left: list[Item]
    first: int
    end: int
    until: float
    hangs: bool = False


class CopySource(SharedMemorySource):
    """The writer's side, for one peer. ``stir``: something has happened to it; its owner asks how it is."""

    def __init__(
        self, writer: WorkerRole, peer: str, process: int, on_change: Callable[[CopySource], None]
    ) -> None:
        super().__init__(writer, peer, process)
        self._on_change = on_change
        self._copies: list[Copy] = []  # in the order of the stream
        self._free_at = 0.0  # the stream

    def _put(self, lease: int, secret: bytes, items: Sequence[Item], first: int, end: int) -> None:
        target = self._about_to_write(items)
        self.world.counts["copies between devices"] += len(items)
        copy = Copy(target, lease, list(items), first, end, self.writer.now + PUT_S)
        self._copies.append(copy)
        copy.hangs = self.world.strikes(self.faults.lost_put, "copies that hang")
        at = max(self.world.queue.now, self._free_at)
        if self.world.strikes(self.faults.late_put, "puts late"):
            at += LATE_S * self.random()
        for _ in items:
            at += 0.001 * self.random()
            self.world.queue.after(at - self.world.queue.now, self._go_on, copy)
        self._free_at = at
        self.writer.after(1.1 * PUT_S, self._look)

    def writing(self, lease: int) -> bool:
        """Whether a copy of this lease is not known to be over."""
        return self._asked_about(lease, [copy.lease for copy in self._copies])

    def poll(self) -> list[Arrival]:
        """Raises MoverError."""
        super().poll()
        if self._copies and self.writer.now > self._copies[0].until:
            raise MoverError("a copy between devices was not complete in time")
        return []

    def pending(self) -> int:
        return sum(len(copy.left) for copy in self._copies)

    def cancel(self, lease: int) -> None:
        """What is under way cannot be called back."""

    def close(self) -> tuple[()]:
        """Wait for the copies under way, all at this moment: the writer sends nothing meanwhile. If one does
        not end, the process does, and its copies with it."""
        copies, self._copies = self._copies, []
        for copy in copies:
            if copy.hangs:
                self.world.counts["ended with a copy that hangs"] += 1
                self.world.kill(self.writer.process)
            while copy.left and self.writer.process.alive:
                self._copy_next(copy)
        return ()

    def _go_on(self, copy: Copy) -> None:
        """The device has come to the next block, whatever the processes do."""
        if (
            copy not in self._copies
            or not self.writer.process.alive
            or any(c.hangs for c in self._copies[: self._copies.index(copy) + 1])
        ):
            return
        self._copy_next(copy)
        if not copy.left:
            self.writer.run(self._is_over, copy)

    def _copy_next(self, copy: Copy) -> None:
        _, source, block = copy.left.pop(0)
        start = copy.first * self.writer.memory.block_size
        self._copy(copy.target, copy.lease, block, start, self.content(source, copy.first, copy.end))
        self._copied(copy.target, block)

    def _is_over(self, copy: Copy) -> None:
        """The writer's process has seen it."""
        if copy in self._copies:
            self._copies.remove(copy)
            self._on_change(self)

    def _look(self) -> None:
        if self._copies:
            self._on_change(self)
