"""The one-sided mover that lingers: what a writer begins is read a little later, travels, and lands whatever
becomes of the writer, also in the memory of a process that stands still; until the receiving process has
ended the agent that this writer comes in by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.movers import Source
from simulation.network import LATE_S

from splitserve.transport.errors import MoverError
from splitserve.transport.movers.interface import Arrival, Item, OneSidedTarget

if TYPE_CHECKING:
    from simulation.worker_role import WorkerRole

    from splitserve.transport.messages.messages import PeerId

PUT_S = 0.8
"""Seconds after which a put not known to have landed counts as failed; it may land all the same."""
ENDING_S = 0.3
"""Most seconds that an agent takes to end."""
READY = 0.8
"""How often the agent for a new peer is there when it is asked for."""


@dataclass(slots=True, eq=False)
class Agent:
    """One peer's way into a decode worker's memory."""

    number: int
    process: WorkerRole
    is_over: bool = False

    def land(self, lease: int, block: int, start: int, values: list[int]) -> None:
        """A part of a put has arrived."""
        process = self.process
        if self.is_over or not process.process.alive:
            process.world.counts["puts after their agent's end"] += 1
        elif process.alive:
            process.written_by_peer(lease, block, start, values)
        else:
            process.world.violated(
                f"{process.name}: block {block} was written under lease {lease}, and its process "
                "has another role now"
            )


class AgentTarget(OneSidedTarget):
    """The receiving side."""

    lingers = True

    def __init__(self, process: WorkerRole) -> None:
        self._process, self._world = process, process.world
        self._agents: dict[PeerId, Agent] = {}
        self._ending: dict[PeerId, Agent] = {}

    def address(self, peer: PeerId) -> bytes | None:
        """None: not ready, the peer will ask again."""
        if peer in self._ending:
            return None
        if peer not in self._agents:
            if self._world.random.random() > READY:
                return None
            agent = self._agents[peer] = Agent(self._world.next_number(), self._process)
            self._world.agents[agent.number] = agent
        return str(self._agents[peer].number).encode()

    def shut_out(self, peer: PeerId) -> bool:
        """Whether nothing of it lands any more; ask again."""
        if (agent := self._agents.pop(peer, None)) is not None:
            self._ending[peer] = agent
            self._world.counts["agents ended"] += 1
            self._process.after(ENDING_S * self._world.random.random(), self._ended, peer)
        return peer not in self._ending

    def close_all(self) -> None:
        """The end of this role."""
        for agent in (*self._agents.values(), *self._ending.values()):
            agent.is_over = True

    def _ended(self, peer: PeerId) -> None:
        self._ending.pop(peer).is_over = True


@dataclass(slots=True, eq=False)
class Write:
    """A put under way."""

    lease: int
    until: float
    failed: str = ""


class AgentSource(Source):
    """The writer's side, for one peer. ``stir``: something has happened to it; its owner asks how it is."""

    def __init__(
        self, writer: WorkerRole, peer: str, agent: Agent, on_change: Callable[[AgentSource], None]
    ) -> None:
        super().__init__(writer, peer, agent.process.endpoint)
        self._agent, self._on_change = agent, on_change
        self._writes: list[Write] = []
        self._closed = False

    def _put(self, lease: int, secret: bytes, items: Sequence[Item], first: int, end: int) -> None:
        if self.world.strikes(self.faults.mover_error, "mover errors"):
            raise MoverError("the adversary says so")
        write = Write(lease, self.writer.now + PUT_S)
        self._writes.append(write)
        self.writer.after(0.001 * self.random() ** 2, self._leave, write, items, first, end)
        self.writer.after(1.1 * PUT_S, self._look)

    def writing(self, lease: int) -> bool:
        """Whether a put of this lease is not known to have landed."""
        return self._asked_about(lease, [write.lease for write in self._writes])

    def poll(self) -> list[Arrival]:
        """Raises MoverError."""
        for write in self._writes:
            if write.failed or self.writer.now > write.until:
                raise MoverError(write.failed or "a put was not complete in time")
        return []

    def pending(self) -> int:
        return len(self._writes)

    def cancel(self, lease: int) -> None:
        """What is under way cannot be called back."""

    def close(self) -> set[int]:
        self._closed = True
        leases = {write.lease for write in self._writes}
        self.world.counts["leases left unsettled"] += len(leases)
        self._writes.clear()
        return leases

    def _leave(self, write: Write, items: Sequence[Item], first: int, end: int) -> None:
        """The adapter reads the blocks: whatever they hold by now."""
        if self._closed:
            return
        if self._agent.is_over or not self._agent.process.process.alive:
            self._fail(write, "the decode worker takes nothing from here")
        elif not self.world.strikes(self.faults.lost_put, "puts lost"):
            delay = 0.0002 + 0.002 * self.random()
            if self.world.strikes(self.faults.late_put, "puts late"):
                delay = 0.01 + LATE_S * self.random()
            for _, source, block in items:
                values = self.content(source, first, end)
                self.world.queue.after(
                    delay, self._agent.land, write.lease, block, first * self.writer.memory.block_size, values
                )
            if self.world.strikes(self.faults.lost_put, "completions lost"):
                self.writer.after(delay * self.random(), self._fail, write, "connection reset")
            else:
                self.writer.after(delay + 0.0005 * self.random(), self._landed, write)

    def _landed(self, write: Write) -> None:
        if write in self._writes:
            self._writes.remove(write)
            self._on_change(self)

    def _fail(self, write: Write, reason: str) -> None:
        write.failed = reason
        self._look()

    def _look(self) -> None:
        if self._writes:
            self._on_change(self)
