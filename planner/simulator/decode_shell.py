"""A simulated decode worker: the real core, a device in place of the model."""

from __future__ import annotations

from typing import Any

from ...decode.core import DecodeCore
from ...decode.rows import DecodeStep
from ...decode.scheduler import DecodeScheduler
from ...engine.cache.block_manager import BlockManager
from ...engine.step.batch import StepOutput
from ...transport.handoff import protocol as act
from ...transport.handoff.receiver import HandoffReceiver
from ...transport.handoff.sender import HandoffSender
from ...transport.messages.messages import SECRET_BYTES, Handoff, Message, PeerId, Placed, Renew
from ...transport.movers.interface import MoverEndpoints
from ...worker.roles import Departure, RoleHost
from .cluster import Pool
from .device import Device
from .worker_shell import HOST, LEASE, MOVERS, Surroundings, WorkerShell


class DecodeShell(WorkerShell):
    """Blocks that have arrived are checked one lease after the other, at the profiled speed."""

    role = "decode"
    core: DecodeCore

    def __init__(
        self, simulation: Surroundings, name: str, pool: Pool, device: Device, host: RoleHost | None
    ) -> None:
        super().__init__(simulation, name, pool, device, host)
        memory, blocks = pool.profile.memory, host.blocks if host else BlockManager(pool.blocks)
        scheduler = DecodeScheduler(
            blocks, memory.block_size, pool.max_num_seqs, memory.max_model_len, frozenset()
        )
        endpoints = MoverEndpoints(MOVERS, HOST, shm_name=self.name)
        receiver = HandoffReceiver(
            self.id, self.model, blocks, endpoints, self._room, lambda: bytes(SECRET_BYTES), LEASE
        )
        self.core = DecodeCore(self.id, scheduler, receiver, self.model.fingerprint, self.meet())
        self.departure = Departure(self.core, "decode", host)
        device.decode = self
        self._peers: dict[PeerId, WorkerShell] = {}  # who can be answered
        self._check_free_at = 0.0
        self._checks: dict[int, list[int]] = {}  # by lease: positions that are being checked

    @property
    def sender(self) -> HandoffSender:
        assert self.core.moving is not None, "it has said how it meets others"
        return self.core.moving.sender

    @property
    def num_growing_blocks(self) -> int:
        """Which the sequences here may need before others end: prompts that are computed beside them leave so
        many."""
        return self.core.room()[1]

    def _room(self) -> tuple[int, int]:
        return self.core.room()

    def from_coordinator(self, message: Message) -> None:
        self.core.from_coordinator(message, self.queue.now)

    def take(self) -> list[Any]:
        return self.core.take(self.queue.now)

    def schedule(self, now: float) -> DecodeStep | None:
        return self.core.schedule(now)

    def complete(self, step: DecodeStep, output: StepOutput) -> None:
        if self.alive:
            self.core.complete(step, output, self.queue.now)

    def hear_peer(self, addressee: PeerId, peer: WorkerShell, peer_id: PeerId, message: Message) -> None:
        """Of a worker that hands over to this one."""
        if self.alive and addressee == self.id:
            self.device.rouse()
            self._peers[peer_id] = peer
            # ask for a check of blocks at most, unless somebody can join now
            if type(message) in (Placed, Renew, Handoff):
                self.core.from_peer(peer_id, message, self.queue.now)
                self._turn_if_somebody_joins()
            else:
                self.core.from_peer(peer_id, message, self.queue.now)
                self.turn()

    def peer_died(self, peer: PeerId) -> None:
        """Its process has ended, and that is known here."""
        if self._peers.pop(peer, None) is not None:
            self.core.receiver.writer_gone(peer)

    def do(self, action: Any) -> None:
        kind = type(action)
        if kind is act.ToPeer:
            if (peer := self._peers.get(action.peer)) is not None:
                self.queue.after(self.message_s, peer.hear_answer, action.peer, self.id, action.message)
        elif kind is act.Verify:
            self._check(action.lease, action.positions)
        elif kind not in (act.OpenLease, act.ExpectAgain, act.CloseLease, act.Join, act.Supersede):
            raise TypeError(f"the simulator does not know the action {action}")

    def _check(self, lease: int, positions: list[int]) -> None:
        handoff, block_bytes = self.pool.profile.handoff, self.pool.profile.memory.block_bytes
        begin = max(self.queue.now, self._check_free_at)
        self._check_free_at = begin + len(positions) * block_bytes / handoff.check_bytes_per_s
        if lease in self._checks:
            self._checks[lease] += positions  # known with those before
        else:
            self._checks[lease] = list(positions)
            self.queue.at(self._check_free_at + handoff.join_s, self._verified, lease)

    def _verified(self, lease: int) -> None:
        positions = self._checks.pop(lease)
        if self.alive:
            self.core.receiver.verified(lease, positions, [], self.queue.now)
            self._turn_if_somebody_joins()

    def _turn_if_somebody_joins(self) -> None:
        """All else that the receiver may want done is nothing to a step."""
        if self.core.receiver.num_joining:
            self.turn()
        else:
            self.carry_out_all()
