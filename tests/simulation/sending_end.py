"""The sending side's shell: channels to decode workers, movers into their memory, checksums of what leaves. Prefill workers have one for
all their handoffs, decode workers one for the sequences that they hand to others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from simulation.agents import AgentSource
from simulation.communicators import RendezvousSource
from simulation.copies import CopySource
from simulation.memory import Memory
from simulation.model import MASK, NUM_LAYERS
from simulation.movers import ParcelSource, SharedMemorySource, Source

from splitserve.transport.channels.incarnation import is_earlier, same_process
from splitserve.transport.errors import MoverError
from splitserve.transport.handoff import actions as act
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.messages.messages import BETWEEN_MOVERS, Ack, Message, Met, Placed, Release, u64

if TYPE_CHECKING:
    from simulation.retiring_role import RetiringRole
    from simulation.worker_process import PeerId, WorkerProcess


class SendingEnd:
    """Carries out what a ``HandoffSender`` wants done."""

    def __init__(self, process: WorkerProcess, sender: HandoffSender) -> None:
        self.writer = process
        self.process: WorkerProcess | RetiringRole = process  # that speaks
        self.world, self.sender = process.world, sender
        self.channels: set[PeerId] = set()
        self._sources: dict[PeerId, Source] = {}
        self._num_broken: Counter[PeerId] = Counter()  # movers that are made anew, since one of them has handed something over
        self._checksums = RunningChecksums(process.memory)
        self._held_back: dict[PeerId, list[tuple[int, Callable[[], None]]]] = {}  # by lease
        self._unsettled: set[int] = set()  # leases under which something may still land that a closed mover had begun
        self._doing: dict[type, Callable[[Any], None]] = {
            act.ToPeer: self._say,
            act.Put: self._put,
            act.SendPlaced: lambda action: self._when_written(action.peer, action.lease, lambda: self._send_placed(action)),
            act.SendHandoff: lambda action: self._when_written(action.peer, action.lease, lambda: self._send_handoff(action)),
            act.CancelPuts: self._cancel_puts,
            act.Connect: self._connect,
            act.OpenMover: lambda action: self._with_mover(action.peer, lambda: self._open_mover(action)),
            act.Delivered: _nothing,
            act.Undelivered: _nothing,
        }

    def stop_writing(self, process: RetiringRole) -> None:
        """Ends all movers; what is said on the channels is the word of a role that is over."""
        for peer in self.channels:
            self._close_mover(peer)
        self.process = process

    def close(self) -> None:
        """Ends all channels and movers; what has not left is lost."""
        for peer in list(self.channels):
            self._forget(peer)
        self._num_broken.clear()

    def hear(self, peer: PeerId, addressee: PeerId, message: Message) -> None:
        """The channel to ``peer`` belongs to an incarnation of ours."""
        if addressee != self.process.id or peer not in self.channels:
            return
        if isinstance(message, BETWEEN_MOVERS):
            if isinstance(source := self._sources.get(peer), RendezvousSource):
                source.hear(message)
                self._stir(peer, source)
            return
        if isinstance(message, Ack):
            self._num_broken.pop(peer, None)
        self.sender.receive(peer, message, self.process.now)
        if isinstance(message, Met) and not same_process(message.incarnation, peer[1]):
            self._replace(peer)
        self.process.turn()

    def carry_out(self, action: Any) -> None:
        self._doing[type(action)](action)

    def _say(self, action: act.ToPeer) -> None:
        lease = action.message.lease if isinstance(action.message, Release) else 0
        self._when_written(action.peer, lease, lambda: self._send(action.peer, action.message))

    def _when_written(self, peer: PeerId, lease: int, say: Callable[[], None]) -> None:
        source = self._sources.get(peer)
        if lease in self._unsettled:
            return
        if lease and source is not None and source.writing(lease):
            self.world.counts["words held back"] += 1
            self._held_back.setdefault(peer, []).append((lease, say))
        else:
            say()

    def _send_placed(self, action: act.SendPlaced) -> None:
        if action.peer in self.channels:
            sums = u64(self._checksums.of(action.source_blocks))
            self._send(action.peer, Placed(lease=action.lease, first=action.first, checksums=sums))

    def _cancel_puts(self, action: act.CancelPuts) -> None:
        if action.peer in self._sources:
            self._sources[action.peer].cancel(action.lease)

    def _connect(self, action: act.Connect) -> None:
        peer = (action.peer.worker_id, action.peer.incarnation)
        others = self._others(peer)
        if any(is_earlier(peer[1], other[1]) for other in others):
            self.sender.peer_lost(peer, "it has been fenced")
            return
        for other in others:
            if is_earlier(other[1], peer[1]):
                self._replace(other)
        self.channels.add(peer)

    def _others(self, peer: PeerId) -> list[PeerId]:
        return [other for other in self.channels if other[0] == peer[0] and other != peer]

    def _replace(self, peer: PeerId) -> None:
        self._forget(peer)
        self.sender.peer_lost(peer, "another incarnation is there")

    def _open_mover(self, action: act.OpenMover) -> None:
        for other in self._others(action.peer):
            self._replace(other)
        (worker_id, _), met = action.peer, action.met
        process = int(met.data_address)
        if met.mover == "nccl":
            rendezvous = RendezvousSource(self.writer, worker_id, process, lambda source: self._stir(action.peer, source))
            self._sources[action.peer] = rendezvous
            self._say_words(action.peer, rendezvous)
            return
        if met.mover == "nixl":
            agent = self.world.agents[int(met.mover_address)]
            self._sources[action.peer] = AgentSource(self.writer, worker_id, agent, lambda source: self._stir(action.peer, source))
            return
        source: Source
        if met.mover == "cuda_ipc":
            source = CopySource(self.writer, worker_id, process, lambda source: self._stir(action.peer, source))
        else:
            source = (SharedMemorySource if met.mover == "shm" else ParcelSource)(self.writer, worker_id, process)
        if met.mover in ("cuda_ipc", "shm") and source.target() is None:
            raise MoverError("that memory is gone")
        self._sources[action.peer] = source

    def _stir(self, peer: PeerId, source: RendezvousSource | AgentSource | CopySource) -> None:
        """What the live loop does in each turn."""
        if self._sources.get(peer) is source:
            self._with_mover(peer, source.poll)
            if not self.writer.process_alive:  # it did not survive the end of its mover
                return
            for lease, say in self._held_back.pop(peer, []):
                self._when_written(peer, lease, say)
            self._say_words(peer, source)
            self.process.turn()

    def _say_words(self, peer: PeerId, source: Source | None) -> None:
        if isinstance(source, RendezvousSource):
            for word in source.session.words():
                self._send(peer, word)

    def _put(self, put: act.Put) -> None:
        blocks = [block for _, block, _ in put.items]
        first, end = put.layers or (0, NUM_LAYERS)
        self.writer.blocks.begin_put(blocks)
        self.world.counts["layers put" if put.layers else "blocks put"] += len(blocks)
        self._with_mover(put.peer, lambda: self._sources[put.peer].put(put.lease, put.secret, put.items, first, end))
        self._say_words(put.peer, self._sources.get(put.peer))
        self._checksums.add(blocks, first, end)
        if self.world.random.random() < 0.1:  # now and then a transfer was timed
            self.sender.moved(put.peer, 1 << 20, 10 ** self.world.random.uniform(-5, -1))

    def _send_handoff(self, action: act.SendHandoff) -> None:
        if action.peer in self.channels:
            sums = u64(self._checksums.of(action.source_blocks))
            handoff = action.message(sums, self.process.now)
            self._send(action.peer, handoff)

    def _with_mover(self, peer: PeerId, use: Callable[[], None]) -> None:
        """A mover that fails ends the handoffs to that peer, which is met anew without it."""
        try:
            if peer in self.channels:
                use()
        except (MoverError, KeyError) as error:
            if isinstance(self._sources.get(peer), RendezvousSource):
                self._count_broken(peer)
            self._close_mover(peer)
            if self.writer.process_alive:
                self.sender.mover_failed(peer, str(error))

    def _count_broken(self, peer: PeerId) -> None:
        """Once it is made anew; if that one fails too, another mover takes its place."""
        self.world.counts["rendezvous movers failed"] += 1
        self._num_broken[peer] += 1
        if self._num_broken[peer] > 2:
            self.world.violated(f"{self.process.name}: a mover to {peer[0]} that has failed twice in a row was made once more")

    def _close_mover(self, peer: PeerId) -> None:
        if (source := self._sources.pop(peer, None)) is not None:
            self._unsettled.update(source.close())
            self._say_words(peer, source)
        self._held_back.pop(peer, None)

    def _forget(self, peer: PeerId) -> None:
        self._close_mover(peer)
        self.channels.discard(peer)

    def _send(self, peer: PeerId, message: Message) -> None:
        if peer in self.channels:
            self.world.network.send(self.process.name, peer[0], message, self._arrives, peer, self.process.id)

    def _arrives(self, peer: PeerId, me: PeerId, message: Message) -> None:
        """The address belongs to the process: a new process or incarnation there gets what was meant for the old one."""
        if (target := self.world.workers.get(peer[0])) is not None:
            target.run(target.hear_peer, me, (self, peer), message)


def _nothing(action: Any) -> None:
    """The core has seen to it."""


class RunningChecksums:
    """A block's checksum is the same whether it leaves whole or in slices; the slices must leave in order."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._begun: dict[int, tuple[int, list[int]]] = {}
        self._done: dict[int, int] = {}

    def add(self, blocks: Sequence[int], first: int, end: int) -> None:
        for block in blocks:
            expected, values = (0, []) if first == 0 else self._begun.pop(block)
            assert expected == first, f"layers of block {block} put out of order"
            values = values + self._memory.read(block, first, end)
            if end == NUM_LAYERS:
                self._done[block] = hash(tuple(values)) & MASK
            else:
                self._begun[block] = end, values

    def of(self, blocks: Sequence[int]) -> list[int]:
        return [self._done[block] for block in blocks]
