"""A decode worker's process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from simulation.agents import AgentTarget
from simulation.communicators import RendezvousTarget
from simulation.model import EOS
from simulation.movers import Parcel, ParcelTarget
from simulation.sending_end import SendingEnd
from simulation.worker_process import BLOCK_SIZE, DRAIN_S, MAX_MODEL_LEN, MODEL, TIMES, PeerId, WorkerProcess

from splitserve.decode.core import DecodeCore
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.transport.channels.incarnation import has_ended, same_process
from splitserve.transport.handoff import actions as act
from splitserve.transport.handoff.handoff import Key
from splitserve.transport.handoff.receiver import HandoffReceiver, MoverEndpoints
from splitserve.transport.handoff.ways_in import Way, WaysIn
from splitserve.transport.messages.messages import BETWEEN_MOVERS, FROM_DECODE, Meet, Message, Met, Retire, Retired

if TYPE_CHECKING:
    from simulation.flexible_process import FlexibleProcess
    from simulation.world import World

Channel = tuple[SendingEnd, PeerId]
"""Its other end, and the incarnation of ours that it was opened to: who opened it takes all that comes on it for that one's word."""


class Mapped:
    """The way in of who has mapped the memory: open as long as that process lives."""

    one_sided, lingers = True, False

    def shut_out(self, peer: PeerId) -> bool:
        return False


class Booked:
    """The way in where this process itself writes what comes."""

    one_sided = lingers = False

    def __init__(self, rendezvous: RendezvousTarget | None) -> None:
        self._rendezvous = rendezvous

    def shut_out(self, peer: PeerId) -> bool:
        if self._rendezvous is not None:
            self._rendezvous.shut_out(peer)
        return True


class DecodeProcess(WorkerProcess):
    """``core`` is the real one; its memory may be written by others."""

    role = "decode"
    base_step_s = 0.02
    core: DecodeCore

    def __init__(self, world: World, name: str, host: str, num_blocks: int, process: FlexibleProcess | None = None) -> None:
        super().__init__(world, name, host, num_blocks, process)
        self._target = ParcelTarget(self.memory)
        self.rendezvous = RendezvousTarget(self) if self.world.scenario.cluster.rendezvous else None
        self._agents = AgentTarget(self)
        ways: dict[str, Way] = {
            "cuda_ipc": Mapped(),
            "shm": Mapped(),
            "nccl": Booked(self.rendezvous),
            "nixl": self._agents,
            "tcp": Booked(None),
        }
        self.ways_in = WaysIn(ways, lambda _: world.counts.update(("writers shut out",)))
        self._books = [self._target.book, *([self.rendezvous.book] if self.rendezvous is not None else [])]
        self._checks: deque[act.Verify] = deque()
        self._peers: dict[PeerId, Channel] = {}  # who can be answered
        self._watched: dict[PeerId, WorkerProcess] = {}  # writers of this host, whose end is seen
        assert self.core.moving is not None
        self.sending = SendingEnd(self, self.core.moving.sender)
        self._doing: dict[type, Callable[[Any], None]] = {
            act.ToPeer: self._to_peer,
            act.Verify: self._verify,
            act.OpenLease: lambda action: [book.open(action.lease, action.secret, action.targets) for book in self._books],
            act.ExpectAgain: lambda action: [book.expect_again(action.lease, action.positions) for book in self._books],
            act.CloseLease: self._close_lease,
            act.Join: lambda action: None,  # the core has seen to it
            act.Supersede: lambda action: None,
        }

    def make_core(self) -> DecodeCore:
        max_num_seqs = self.world.scenario.cluster.max_num_seqs
        scheduler = DecodeScheduler(self.blocks, BLOCK_SIZE, max_num_seqs, MAX_MODEL_LEN, EOS, window=self.model.window)
        endpoints = MoverEndpoints(("cuda_ipc", "shm", "nccl", "nixl", "tcp"), self.host, shm_name="shm", data_address=str(self.endpoint))
        receiver = HandoffReceiver(
            self.id, self.model, self.blocks, endpoints, lambda: self.core.room(), lambda: self.world.random.randbytes(16), TIMES
        )
        return DecodeCore(self.id, scheduler, receiver, MODEL.fingerprint, self.meet(), DRAIN_S)

    def runs_ahead(self) -> bool:
        return True

    def take(self) -> list[Any]:
        return self.core.take(self.now)

    def from_coordinator(self, message: Message) -> None:
        self.core.from_coordinator(message, self.now)

    def shrink_step(self, step: Any) -> None:
        self.core.shrink_step(step)

    def request_ids(self, step: Any) -> Iterable[str]:
        return (sequence.request_id for sequence in step.sequences)

    def still_held(self, keys: set[Key]) -> Iterable[Key]:
        moving = self.core.moving.keys() if self.core.moving is not None else ()
        return keys.intersection((*self.core.scheduler.held, *self.core.receiver.keys(), *moving))

    def take_new_incarnation(self) -> None:
        """What the old incarnation still owes its peers is said before its channels close."""
        self.core.drop_others(-1)
        self.carry_out_all()
        self.sending.close()
        self.incarnation = self.next_incarnation()
        self.core.rename(self.incarnation)

    def block_tables(self) -> Iterable[Sequence[int]]:
        return self.core.block_tables()

    def heartbeat(self) -> None:
        for peer, writer in list(self._watched.items()):
            if not writer.process_alive and self.ways_in.process_ended(peer, self.core.receiver):
                del self._watched[peer]
                self._peers.pop(peer, None)
        self.ways_in.look(self._watched, self.core.receiver, self.now)
        super().heartbeat()

    def hear_peer(self, peer: PeerId, channel: Channel, message: Message) -> None:
        known = self._peers.get(peer)
        if known is None or self._age(channel) >= self._age(known):  # what an older channel still brings is no way back
            self._peers[peer] = channel
        if isinstance(message, Meet):
            if here := message.host == self.host:
                self._watched[peer] = channel[0].writer
            if not self.ways_in.may_meet(peer, message, here, self.core.receiver):
                return
        if isinstance(message, Retire) and not self.ways_in.may_retire(peer, message, self.core.receiver):
            return
        if not isinstance(message, BETWEEN_MOVERS):
            self.core.from_peer(peer, message, self.now)
            self.turn()
        elif self.rendezvous is not None:
            self.rendezvous.hear(peer, message)

    def _age(self, channel: Channel) -> int:
        opened_to = channel[1][1]
        return opened_to if same_process(opened_to, self.incarnation) else 0

    def do(self, action: Any) -> None:
        self._doing.get(type(action), self.sending.carry_out)(action)

    def _close_lease(self, action: act.CloseLease) -> None:
        for book in self._books:
            book.close(action.lease)
        if self._checks:
            self._checks = deque(check for check in self._checks if check.lease != action.lease)

    def _to_peer(self, action: act.ToPeer) -> None:
        """To one that hands over to us, or to one that we hand over to."""
        if not isinstance(action.message, FROM_DECODE):
            self.sending.carry_out(action)
        elif (channel := self._peers.get(action.peer)) is not None:
            end, opened_to = channel
            if isinstance(action.message, Retired) and has_ended(action.peer[1], action.message.incarnation):  # nothing more comes from it
                del self._peers[action.peer]
                self._watched.pop(action.peer, None)
                self.ways_in.forget(action.peer)
            said = self._complete(action.message, action.peer) if isinstance(action.message, Met) else action.message
            if said is not None:
                self.world.network.send(self.name, end.process.name, said, end.process.run, end.hear, opened_to, action.peer)

    def _complete(self, met: Met, peer: PeerId) -> Met | None:
        """With what this peer's mover needs. None: not ready, it will ask again."""
        if met.mover == "nccl" and self.rendezvous is not None:
            self.rendezvous.sessions.meet(peer)
        if met.mover == "nixl":
            if (address := self._agents.address(peer)) is None:
                return None
            met = replace(met, mover_address=address)
        if met.mover:
            self.ways_in.met(peer, met.mover)
        return met

    def die(self) -> None:
        super().die()
        self._agents.close_all()

    # --- blocks that come ------------------------------------------------------------------------

    def _verify(self, action: act.Verify) -> None:
        """A little in each turn of the loop: most are known at once, some later, some in two parts."""
        random = self.world.random.random
        if len(action.positions) > 1 and random() < 0.3:
            action, rest = action.split(1 + int(random() * (len(action.positions) - 1)))
            self._checks.append(rest)
            self.after(0.004 * random(), self._check_rest)
        if random() < 0.2:
            self._checks.append(action)
            self.after(0.004 * random(), self._check_rest)
        else:
            self._check(action)

    def _check_rest(self) -> None:
        if self._checks:
            self._check(self._checks.popleft())
            self.turn()

    def _check(self, check: act.Verify) -> None:
        rows = zip(check.positions, check.blocks, check.checksums, strict=True)
        wrong = [position for position, block, checksum in rows if self.memory.checksum(block) != checksum]
        self.world.counts["corrupt blocks found"] += len(wrong)
        self.core.receiver.verified(check.lease, check.positions, wrong, self.now)

    def on_parcel(self, parcel: Parcel) -> None:
        """The two-sided mover: whole slices at places that are expected, or nothing."""
        complete = self._target.take_in(parcel)
        if complete is None:
            self.world.counts["parcels refused"] += 1
            return
        if self.core.receiver.mover_of(parcel.lease) != "tcp":
            self.world.violated(f"{self.name}: a parcel of lease {parcel.lease} was written, which had ended or belongs to another mover")
        for position in complete:
            self.core.receiver.arrived(parcel.lease, position)
        self.turn()

    def written_by_itself(self, lease: int, blocks: list[int], start: int, slices: list[list[int]]) -> None:
        """By a communicator: what has been received is copied into the pool."""
        if not set(blocks) <= set(self.core.receiver.blocks_open_to(lease)) or self.core.receiver.mover_of(lease) != "nccl":
            self.world.violated(f"{self.name}: blocks {blocks} were written under lease {lease}, which had ended or is another mover's")
        for block, values in zip(blocks, slices, strict=True):
            self.memory.write(block, start, values)

    def written_by_peer(self, lease: int, block: int, start: int, values: list[int]) -> None:
        """The one-sided mover: the memory changes, whatever this process thinks or does."""
        if block not in self.core.receiver.blocks_open_to(lease):
            self.world.violated(f"{self.name}: block {block} was written under lease {lease}, which had ended")
        if self.core.receiver.mover_of(lease) in ("tcp", "nccl"):
            self.world.violated(f"{self.name}: block {block} was written by its peer itself, under a lease of another mover")
        self.memory.write(block, start, values)
