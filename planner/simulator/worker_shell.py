"""What the simulated workers of both roles have in common: the loop around a core, as thin as the live
one."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from ...transport.handoff import protocol as act
from ...transport.handoff.protocol import HandoffTimes
from ...transport.handoff.sender import HandoffSender
from ...transport.messages.messages import (
    Fenced,
    Flip,
    Goodbye,
    Hello,
    Meet,
    Message,
    ModelIdentity,
    PeerId,
    Placed,
    Role,
    Welcome,
)
from ...worker.roles import Departure, RoleHost
from .cluster import Pool
from .device import Device
from .events import EventQueue

TICK_S = 0.25  # the live ones tick every 0.05 s, which matters to deadlines alone
LEASE = HandoffTimes()
MOVERS, HOST = ("shm",), "simulated"
"""A one-sided mover: the receiver hears of blocks (Placed, Handoff) when they are there."""


class CoordinatorLine(Protocol):
    """The coordinator, as workers reach it."""

    def hear(self, worker: PeerId, message: Message) -> None:
        """Any message."""


class Receiver(Protocol):
    """A decode worker, as those that hand over to it reach it."""

    device: Device
    bytes_per_s: float
    in_free_at: float

    @property
    def id(self) -> PeerId:
        """Name and incarnation."""

    def hear_peer(self, addressee: PeerId, peer: WorkerShell, peer_id: PeerId, message: Message) -> None:
        """What a worker says that hands over to it."""


class Surroundings(Protocol):
    """What workers see of the simulation."""

    queue: EventQueue
    draw: random.Random
    heartbeat_s: float

    @property
    def coordinator(self) -> CoordinatorLine:
        """There is one."""

    @property
    def decode_workers(self) -> Mapping[str, Receiver]:
        """Those that are alive, by name."""

    def next_number(self) -> int:
        """For an incarnation."""

    def restart(self, shell: WorkerShell, down_s: float) -> None:
        """Its machine's processes end now and start again after ``down_s``."""

    def left(self, shell: WorkerShell) -> None:
        """It has drained, and ended in good order."""


class WorkerShell(ABC):
    """An inbox, a device, a heartbeat. Workers of one device hand over within it."""

    role: Role
    core: Any
    departure: Departure

    def __init__(
        self, simulation: Surroundings, name: str, pool: Pool, device: Device, host: RoleHost | None
    ) -> None:
        """``host``: its process, where that can change its role, or has both."""
        self.simulation, self.queue = simulation, simulation.queue
        self.name, self.pool, self.device, self.host = name, pool, device, host
        self.model = _model_of(pool)
        self.message_s, self.bytes_per_s = pool.message_s, pool.bytes_per_s
        self.incarnation = simulation.next_number()
        self.id: PeerId = (name, self.incarnation)
        self.alive = True
        self.out_free_at = self.in_free_at = 0.0  # until then its link is taken
        self.num_bytes_out = 0
        self._ticked = 0.0
        self._reported = -1e9
        self.rests = False  # it says at every heartbeat what it has said at the last one: there are no ticks
        self._welcomed = False
        self._connected: set[PeerId] = set()
        self._puts_done: dict[PeerId, float] = {}  # when the last put to this peer has arrived

    def start(self) -> None:
        """Says hello, and lives."""
        self._tell(self._hello())
        self.queue.after(TICK_S * self.simulation.draw.random(), self._tick)

    def hear(self, addressee: PeerId, message: Message) -> None:
        """Of the coordinator."""
        if not self.alive or addressee != self.id:
            return
        self.device.rouse()
        if isinstance(message, Welcome):
            self._welcomed = True
            self.core.drop_others(message.coordinator)
            if (events := self.core.block_events(everything=True)) is not None:
                self._tell(events)
        elif isinstance(message, Fenced):
            self.simulation.restart(self, 0.0)
            return
        elif isinstance(message, Flip):
            self.queue.after(self.pool.profile.flip_s or 0.0, self._flip, message)
        else:
            self.from_coordinator(message)
        self.turn()

    def _flip(self, order: Flip) -> None:
        """The worker of the new role is there, and says hello; this one begins to drain."""
        if self.alive:
            self.device.rouse()
            self.departure.flip(order.role, order.timeout_s, self.queue.now)
            self.turn()

    @abstractmethod
    def from_coordinator(self, message: Message) -> None:
        """What only this role is told."""

    @abstractmethod
    def take(self) -> list[Any]:
        """The core's actions since the last call."""

    @abstractmethod
    def do(self, action: Any) -> None:
        """Carries out what only this role does."""

    def die(self) -> None:
        """Its process ends now. What it has said is on its way."""
        self.alive = False

    @property
    @abstractmethod
    def sender(self) -> HandoffSender:
        """By which KV blocks leave."""

    def turn(self) -> None:
        """One turn of the loop."""
        if not self.alive:
            return
        self.device.wake()
        if self.carry_out_all():
            self.device.wake()

    def carry_out_all(self) -> bool:
        """Whatever the core wants done now. False: nothing."""
        busy = False
        while self.core.has_actions and (actions := self.take()):
            busy = True
            for action in actions:
                if type(action) is act.ToCoordinator:
                    self._tell(action.message)
                elif not self._send(action):
                    self.do(action)
        return busy

    def _tick(self) -> None:
        if not self.alive:
            return
        self._ticked = now = self.queue.now
        self.core.tick(now)
        reports = self._welcomed and self._report_is_due(now)
        if reports:
            self._report(now)
        if self.core.has_actions or not self.device.busy:
            self.turn()
        if self.departure.is_due(now):
            self._leave()
            return
        self.rests = reports and self.device.jumps and not self.core.drains and self.device.rests
        if not self.rests:
            self.queue.after(TICK_S, self._tick)

    def _leave(self) -> None:
        """Whoever it wrote to need not be told that it writes no more: no word of it was lost."""
        self._tell(Goodbye(worker_id=self.name, incarnation=self.incarnation))
        self.alive = False
        self.simulation.left(self)

    def rouse(self) -> None:
        """It has been at rest, where one report is as the other and no tick does anything: from now on there
        are some again, at the times at which they would have been."""
        self.rests = False
        while (following := self._ticked + TICK_S) <= self.queue.now:
            self._ticked = following
            if self._report_is_due(following):
                self._reported = following
        self.queue.at(following, self._tick)

    def _report_is_due(self, now: float) -> bool:
        return now - self._reported > self.simulation.heartbeat_s - TICK_S / 2

    def _report(self, now: float) -> None:
        self._reported = now
        self._tell(self.core.load())
        if (events := self.core.block_events()) is not None:
            self._tell(events)

    def _tell(self, message: Message) -> None:
        self.queue.after(self.message_s, self.simulation.coordinator.hear, self.id, message)

    # --- the sending side of the handoff -----------------------------------------------------------

    def _send(self, action: Any) -> bool:
        """What the handoff's sender wants done. False: it is none of that."""
        kind = type(action)
        if kind is act.ToPeer:
            if action.peer not in self._connected:
                return False
            self._say(action.peer, action.message)
        elif kind is act.Put:
            self._put(action)
        elif kind is act.SendPlaced:
            sums = bytes(8 * len(action.source_blocks))
            self._say_after_puts(action.peer, Placed(lease=action.lease, first=action.first, checksums=sums))
        elif kind is act.SendHandoff:
            sums = bytes(8 * len(action.source_blocks))
            handoff = action.message(sums, max(self.queue.now, self._puts_done.get(action.peer, 0.0)))
            self._say_after_puts(action.peer, handoff)
        elif kind is act.Connect:
            self._connect((action.peer.worker_id, action.peer.incarnation))
        elif kind not in (act.OpenMover, act.CancelPuts, act.Delivered, act.Undelivered):
            return False
        return True

    def _connect(self, peer: PeerId) -> None:
        for earlier in [p for p in self._connected if p[0] == peer[0] and p != peer]:
            self._connected.discard(earlier)
            self._puts_done.pop(earlier, None)
            self.sender.peer_lost(earlier, "it has restarted")
        self._connected.add(peer)

    def _say(self, peer: PeerId, message: Message, at: float = 0.0) -> None:
        target = self.simulation.decode_workers.get(peer[0])
        if target is not None:
            self.queue.at(
                max(at, self.queue.now) + self.message_s, target.hear_peer, peer, self, self.id, message
            )

    def _say_after_puts(self, peer: PeerId, message: Message) -> None:
        self._say(peer, message, self._puts_done.get(peer, 0.0))

    def _put(self, put: act.Put) -> None:
        """Through the link of both ends, one put after the other; within one device at once. How long it
        takes is known now: nobody hears of its end but by what is said after it."""
        target = self.simulation.decode_workers.get(put.peer[0])
        if target is None or target.id != put.peer:
            return
        num_layers = self.pool.profile.memory.num_layers
        first, end = put.layers or (0, num_layers)
        num_bytes = len(put.items) * self.pool.profile.memory.block_bytes * (end - first) // num_layers
        num_slices = len(put.items) if end - first < num_layers else 0
        now = self.queue.now
        done = now if target.device is self.device else self._over_the_link(target, num_bytes, num_slices)
        self._puts_done[put.peer] = done
        self.sender.meetings.note_transfer(put.peer, num_bytes, done - now)

    def _over_the_link(self, target: Receiver, num_bytes: int, num_slices: int) -> float:
        begin = max(self.queue.now, self.out_free_at, target.in_free_at)
        done = begin + self.pool.profile.handoff.seconds(
            num_bytes, num_slices, min(self.bytes_per_s, target.bytes_per_s)
        )
        self.out_free_at = target.in_free_at = done
        self.num_bytes_out += num_bytes
        return done

    def hear_answer(self, me: PeerId, peer: PeerId, message: Message) -> None:
        """Of a decode worker, to what was said to it."""
        if self.alive and me == self.id:
            self.device.rouse()
            self.sender.receive(peer, message, self.queue.now)
            self.turn()

    def meet(self) -> Meet:
        return Meet(
            worker_id=self.name,
            incarnation=self.incarnation,
            host=HOST,
            pid=self.incarnation,
            model=self.model,
            movers=MOVERS,
        )

    def _hello(self) -> Hello:
        pool = self.pool
        return Hello(
            worker_id=self.name,
            incarnation=self.incarnation,
            role=self.role,
            host=HOST,
            pid=self.incarnation,
            model=self.model,
            max_model_len=pool.profile.memory.max_model_len,
            vocab_size=1 << 30,
            num_blocks=self.core.blocks.num_blocks,
            max_num_seqs=pool.max_num_seqs,
            max_batch_tokens=pool.max_batch_tokens if self.role == "prefill" else pool.max_num_seqs,
            peer_address=self.name if self.role == "decode" else "",
            process=self.host.process if self.host else "",
            mixed=self.host.mixed if self.host else False,
        )


def _model_of(pool: Pool) -> ModelIdentity:
    memory = pool.profile.memory
    return ModelIdentity(
        fingerprint="one model",
        dtype="simulated",
        block_size=memory.block_size,
        layout="simulated",
        block_bytes=memory.block_bytes,
    )
