"""What the shells of a simulated worker touch: its clock, network, memory and movers, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from simulation.agents import AgentSource
from simulation.communicators import RendezvousSource
from simulation.copies import CopySource
from simulation.memory import Memory
from simulation.model import MASK, NUM_LAYERS
from simulation.movers import ParcelSource, SharedMemorySource, Source

from splitserve.transport.environment import Environment
from splitserve.transport.errors import MoverError
from splitserve.transport.handoff.protocol import Connect, SenderAction
from splitserve.transport.handoff.reachability import ReachTimes
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.messages.messages import Met, PeerId

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.worker_role import WorkerRole

REACH = ReachTimes(beyond_reach=0.4, first_contact=0.8, forgotten=8.0)
BLOCK_BYTES = 1 << 18
LOOKED_S = 0.5
"""Seconds within which a worker that is awake gives a peer up, once its patience has ended."""


class VirtualClock:
    def __init__(self, process: Process) -> None:
        self._process = process

    def now(self) -> float:
        return self._process.now


class VirtualDevice:
    """The process's memory. A block's checksum is the same whether it leaves whole or in slices, which must
    leave in order."""

    num_layers, block_bytes, sums_on_gpu = NUM_LAYERS, BLOCK_BYTES, False

    def __init__(self, process: WorkerRole) -> None:
        self._process, self._counts = process, process.world.counts
        self._begun: dict[int, tuple[int, list[int]]] = {}
        self._done: dict[int, int] = {}

    @property
    def _memory(self) -> Memory:
        return self._process.memory

    def write_test_block(self, block: int, seed: Sequence[int]) -> None:
        draw = random.Random(f"{seed}")
        self._counts["movers tested"] += 1
        self._memory.write(
            block, 0, [draw.getrandbits(60) for _ in range(NUM_LAYERS * self._memory.block_size)]
        )

    def add_sent(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> None:
        self._process.blocks.begin_put(blocks)
        self._counts["blocks put" if num_layers == NUM_LAYERS else "layers put"] += len(blocks)
        end = first_layer + num_layers
        for block in blocks:
            expected, values = (0, []) if first_layer == 0 else self._begun.pop(block)
            assert expected == first_layer, f"layers of block {block} put out of order"
            values = values + self._memory.read(block, first_layer, end)
            if end == NUM_LAYERS:
                self._done[block] = hash(tuple(values)) & MASK
            else:
                self._begun[block] = end, values

    def sent_checksums(self, blocks: Sequence[int]) -> list[int]:
        return [self._done[block] for block in blocks]

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return [self._memory.checksum(block) for block in blocks]


class VirtualMover:
    """``poll``: has the process's loop turn, for something has happened to a mover."""

    def __init__(self, process: WorkerRole) -> None:
        self._process, self._world = process, process.world

    def open(self, met: Met) -> Source:
        source = self._open(met)
        if met.mover != "tcp":
            chance = self._world.scenario.faults.broken_mover
            source.is_broken = self._world.strikes(chance, "movers that copy wrong")
        return source

    def _open(self, met: Met) -> Source:
        process, kind = self._process, met.mover
        if kind == "nccl":
            return self._open_rendezvous(met)
        if kind == "nixl":
            return AgentSource(process, met.worker_id, self._world.agents[int(met.mover_address)], self._poll)
        endpoint = int(met.data_address)
        source: Source
        if kind == "cuda_ipc":
            source = CopySource(process, met.worker_id, endpoint, self._poll)
        else:
            source = (SharedMemorySource if kind == "shm" else ParcelSource)(process, met.worker_id, endpoint)
        if kind in ("cuda_ipc", "shm") and source.target() is None:
            raise MoverError("that memory is gone")
        return source

    def _open_rendezvous(self, met: Met) -> RendezvousSource:
        """Made anew once; if that one fails too, another mover is to take its place."""
        process, peer = self._process, (self._process.id, (met.worker_id, met.incarnation))
        if process.num_broken[peer] >= 2:
            self._world.violated(
                f"{process.name}: a mover to {met.worker_id} that failed twice in a row was made again"
            )
        source = RendezvousSource(process, met.worker_id, int(met.data_address), self._poll)
        source.failed = lambda: self._has_failed(peer)
        process.after(0.001, process.poll)
        return source

    def _has_failed(self, peer: tuple[PeerId, PeerId]) -> None:
        self._world.counts["rendezvous movers failed"] += 1
        self._process.num_broken[peer] += 1

    def _poll(self, source: Source) -> None:
        self._process.poll()


def environment_of(process: WorkerRole) -> Environment:
    return Environment(
        VirtualClock(process.process), process.network, VirtualDevice(process), VirtualMover(process)
    )  # type: ignore[arg-type]


class ReachCheck:
    """Holds what a sending end makes of peers that cannot be reached against the rule, in words of its
    own."""

    def __init__(self, process: WorkerRole, sender: HandoffSender) -> None:
        self._process, self._sender = process, sender
        self._wanted_at: dict[PeerId, float] = {}
        self._take, self._peer_lost = sender.take, sender.peer_lost
        patched: dict[str, Callable[..., object]] = {
            "take": self._watch_take,
            "peer_lost": self._watch_peer_lost,
        }
        for name, method in patched.items():
            setattr(sender, name, method)

    def look(self) -> None:
        """No handoff waits for a peer whose time is over, once the worker has received all messages."""
        if not self._process.awake:
            return
        for out in self._sender.outgoing.values():
            away_s, patience_s = self._away_s(out.peer) or 0.0, self._patience_s(out.peer)
            if away_s > patience_s + LOOKED_S:
                self._violated(
                    f"a handoff waits for {out.peer[0]}, which has been beyond reach for {away_s:.1f} s"
                )

    def _watch_take(self) -> list[SenderAction]:
        actions = self._take()
        for action in actions:
            if isinstance(action, Connect):
                self._wanted_at[action.peer.worker_id, action.peer.incarnation] = self._process.now
        return actions

    def _watch_peer_lost(self, peer: PeerId, reason: str) -> None:
        if reason.endswith("cannot be reached from here"):
            self._process.world.counts["peers beyond reach"] += 1
            away_s = self._away_s(peer)
            if away_s is None or away_s < self._patience_s(peer):
                self._violated(f"{peer[0]} was given up, which was away for {away_s} s since it was wanted")
        self._peer_lost(peer, reason)

    def _patience_s(self, peer: PeerId) -> float:
        channel = self._process.network.channels.get(peer)
        return REACH.beyond_reach if channel is not None and channel.ever_connected else REACH.first_contact

    def _away_s(self, peer: PeerId) -> float | None:
        """How long it has been away since it was wanted; None: it is there, or there is no channel to it."""
        channel, now = self._process.network.channels.get(peer), self._process.now
        if channel is None or channel.closed or (gone_since := channel.gone_since(now)) is None:
            return None
        return now - max(gone_since, self._wanted_at.get(peer, gone_since))

    def _violated(self, what: str) -> None:
        self._process.world.violated(f"{self._process.name}: {what}")
