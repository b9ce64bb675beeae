"""A prefill worker's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simulation.decode_process import DecodeProcess
from simulation.model import EOS
from simulation.movers import MoverError, Source, open_source
from simulation.worker_process import BLOCK_SIZE, MAX_MODEL_LEN, MODEL, TIMES, PeerId, WorkerProcess

from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport import actions as act
from splitserve.transport.messages import Handoff, Meet, Message, Placed, u64

if TYPE_CHECKING:
    from simulation.world import World


class PrefillProcess(WorkerProcess):
    """``core`` is the real one; channels and movers are opened and forgotten as the live worker does."""

    role = "prefill"
    base_step_s = 0.004
    core: PrefillCore

    def __init__(self, world: World, name: str, host: str, num_blocks: int) -> None:
        self._movers = ("shm", "zmq") if world.random.random() < world.scenario.cluster.one_sided else ("zmq",)
        self._channels: set[PeerId] = set()
        self._sources: dict[PeerId, Source] = {}
        self._checksums: dict[int, int] = {}  # by own block, from when it was last put
        super().__init__(world, name, host, num_blocks)

    def make_core(self) -> PrefillCore:
        cluster = self.world.scenario.cluster
        scheduler = PrefillScheduler(self.blocks, BLOCK_SIZE, MODEL.fingerprint, cluster.max_batch_tokens, cluster.max_num_seqs)
        return PrefillCore(self._meet(), scheduler, EOS, MAX_MODEL_LEN, TIMES)

    def take(self) -> list[Any]:
        return self.core.take()

    def from_coordinator(self, message: Message) -> None:
        self.core.from_coordinator(message, self.now)

    def take_new_incarnation(self) -> None:
        """What the old incarnation still owes its peers is said before its channels close."""
        self.core.drop_others(-1)
        for action in self.take():
            self._carry_out(action, self.id)
        for peer in list(self._channels):
            self._forget(peer)
        self.incarnation = self.world.next_number()
        self.core.rename(self._meet())

    def block_tables(self) -> Iterable[Sequence[int]]:
        return self.core.block_tables()

    def hear_peer(self, peer: PeerId, addressee: PeerId, message: Message) -> None:
        """The channel to ``peer`` belongs to an incarnation of ours."""
        if addressee == self.id and peer in self._channels:
            self.core.from_peer(peer, message, self.now)
            self.turn()

    def do(self, action: Any) -> None:
        match action:
            case act.ToPeer():
                self._send(action.peer, action.message)
            case act.Put():
                self._put(action)
            case act.SendPlaced():
                self._send_placed(action)
            case act.SendHandoff():
                self._send_handoff(action)
            case act.CancelPuts():
                if action.peer in self._sources:
                    self._sources[action.peer].cancel(action.lease)
            case act.Connect():
                self._connect((action.peer.worker_id, action.peer.incarnation))
            case act.OpenMover():
                self._with_mover(action.peer, lambda: self._open_mover(action))
            case act.Delivered() | act.Undelivered():
                pass  # the core has seen to it
            case _:
                raise TypeError(f"the simulator does not know the action {action}")

    def _connect(self, peer: PeerId) -> None:
        for earlier in [p for p in self._channels if p[0] == peer[0] and p != peer]:
            self._forget(earlier)
            self.core.sender.peer_lost(earlier, "it has restarted")
        self._channels.add(peer)

    def _open_mover(self, action: act.OpenMover) -> None:
        self._sources[action.peer] = open_source(self, action.peer[0], action.met)

    def _put(self, put: act.Put) -> None:
        self.blocks.begin_put(block for _, block, _ in put.items)
        self._with_mover(put.peer, lambda: self._sources[put.peer].put(put.lease, put.secret, put.items))
        self.world.counts["blocks put"] += len(put.items)
        for _, block, _ in put.items:
            self._checksums[block] = self.memory.checksum(block)

    def _send_placed(self, action: act.SendPlaced) -> None:
        if action.peer in self._channels:
            checksums = u64([self._checksums[b] for b in action.source_blocks])
            self._send(action.peer, Placed(lease=action.lease, first=action.first, checksums=checksums))

    def _send_handoff(self, action: act.SendHandoff) -> None:
        if action.peer not in self._channels:
            return
        checksums = u64([self._checksums[b] for b in action.source_blocks])
        handoff = Handoff(spec=action.spec, lease=action.lease, token=action.token, logprobs=action.logprobs, checksums=checksums)
        self._send(action.peer, handoff)

    def _with_mover(self, peer: PeerId, use: Callable[[], None]) -> None:
        """A mover that fails ends the handoffs to that peer."""
        try:
            if peer in self._channels:
                use()
        except (MoverError, KeyError) as error:
            self._close_mover(peer)
            self.core.sender.mover_failed(peer, str(error))

    def _close_mover(self, peer: PeerId) -> None:
        if (source := self._sources.pop(peer, None)) is not None:
            source.close()

    def _forget(self, peer: PeerId) -> None:
        self._channels.discard(peer)
        self._close_mover(peer)

    def _send(self, peer: PeerId, message: Message) -> None:
        if peer in self._channels:
            self.world.network.send(self.name, peer[0], message, self._arrives, peer, self.id)

    def _arrives(self, peer: PeerId, me: PeerId, message: Message) -> None:
        """The address belongs to the process: a new process or incarnation there gets what was meant for the old one."""
        target = self.world.workers[peer[0]]
        assert isinstance(target, DecodeProcess)
        target.run(target.hear_peer, me, (self, peer), message)

    def _meet(self) -> Meet:
        return Meet(worker_id=self.name, incarnation=self.incarnation, host=self.host, pid=self.pid, model=MODEL, movers=self._movers)
