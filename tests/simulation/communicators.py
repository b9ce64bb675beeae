"""The rendezvous mover: both ends of the mover ``nccl`` as they ship, over communicators that never come
about, break, hang, or bring what nobody wants any more.

In the live mover each end of a communicator is a thread of its process that does one thing at a time; so
here. Pieces come in the order in which they left, whatever they are (NCCL knows no tags), and an end that is
torn down may still end what it is at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from simulation.communicator_ends import NOTICED, PATIENCE_S, CommunicatorEnd, Piece
from simulation.model import NUM_LAYERS
from simulation.movers import PARCEL, Source
from simulation.network import LATE_S

from splitserve.transport.errors import MoverError
from splitserve.transport.messages.messages import Message
from splitserve.transport.movers.interface import Arrival, Item
from splitserve.transport.movers.nccl import NcclSource, NcclTarget, Session
from splitserve.transport.movers.parcel_source import Parcel

if TYPE_CHECKING:
    from simulation.worker_role import WorkerRole

    from splitserve.transport.messages.messages import PeerId


class RendezvousSource(Source):
    """The sending end. ``on_change`` is called after each event; its owner then sends its messages and asks
    for its state."""

    def __init__(
        self, writer: WorkerRole, peer: str, process: int, on_change: Callable[[RendezvousSource], None]
    ) -> None:
        super().__init__(writer, peer, process)
        self._on_change = on_change
        self.failed: Callable[[], None] = _nothing
        size = writer.memory.block_size
        shape = (len(writer.memory.values) // (NUM_LAYERS * size), NUM_LAYERS, size)
        number = self.world.next_number()
        self._end = CommunicatorEnd(writer, self._met, self._broke, _nothing)
        memory, end = cast(Any, writer.memory), cast(Any, self._end)
        self.session = NcclSource(b"cpu", "cpu", memory, shape, lambda *_: end)
        self.session.number = number  # of the world's, so that a seed replays
        self.session.send_entry("0", str(self._end.number).encode())
        self._given: dict[
            tuple[int, int], int
        ] = {}  # by lease and own block: how often it had been given to somebody when it was put
        self._cancelled: set[int] = set()  # leases
        self._is_watched = False
        self._watch()

    def _put(self, lease: int, secret: bytes, items: Sequence[Item], first: int, end: int) -> None:
        if self.world.strikes(self.faults.mover_error, "mover errors"):
            self.failed()
            raise MoverError("the adversary says so")
        for at in range(0, len(items), PARCEL):
            self.session.put(lease, secret, items[at : at + PARCEL], first, end - first)
        self._given.update({(lease, block): self.writer.blocks.times_given[block] for _, block, _ in items})
        self._go_on()

    def receive(self, message: Message) -> None:
        self.session.receive(message)

    def take_messages(self) -> list[Message]:
        return self.session.take_messages()

    def poll(self) -> list[Arrival]:
        try:
            self.session.poll()
        except MoverError:
            self.failed()
            raise
        return []

    def cancel(self, lease: int) -> None:
        self._cancelled.add(lease)
        self.session.cancel(lease)

    def close(self) -> tuple[()]:
        return self.session.close()

    def _met(self) -> None:
        self.world.counts["communicators made"] += 1
        self._go_on()

    def _broke(self, reason: str) -> None:
        self.session.broke(reason)
        self._on_change(self)

    def _go_on(self) -> None:
        if self._end.busy_since < 0.0 and (parcel := self.session.next()) is not None:
            self._end.begin()
            self._watch()
            self.writer.after(0.001 * self.random() ** 2, self._leave, parcel)

    def _leave(self, parcel: Parcel) -> None:
        """The blocks are read now."""
        end, other = self._end, self._end.other
        if end.is_torn or other is None:
            return
        given = self.writer.blocks.times_given
        if parcel.lease not in self._cancelled and any(
            self._given[(parcel.lease, block)] != given[block] for block in parcel.blocks
        ):
            self.world.violated(
                f"{self.writer.name}: blocks of lease {parcel.lease} were given to others before "
                "they had left"
            )
        slices = [self.content(block, parcel.layers.start, parcel.layers.stop) for block in parcel.blocks]
        if end.is_alone:
            if self.random() < NOTICED:
                self.writer.after(0.001, end.give_up, "its other end is gone")
        elif self.world.strikes(self.faults.broken_communicator, "communicators broken"):
            self._break(slices, other)
        elif self.random() < 0.5:  # it is buffered somewhere
            other.arrive(Piece(slices, _nothing))
            self.writer.after(0.001 * self.random(), self._left, parcel)
        else:
            other.arrive(Piece(slices, lambda: self.writer.run(self._left, parcel)))

    def _break(self, slices: list[list[int]], other: CommunicatorEnd) -> None:
        """In the middle of a piece. One end notices, or both; or the other takes what has come for the whole,
        or ends it long after."""
        how = self.world.random.choice(("both", "here", "there", "taken for whole", "late"))
        if how != "there":
            self.writer.after(0.01 * self.random(), self._end.give_up, "connection reset")
        if how in ("both", "there"):
            other.process.after(0.01 * self.random(), other.give_up, "connection reset")
        if how == "taken for whole":
            half = len(slices) // 2
            other.arrive(Piece(slices[:half] + [[0] * len(values) for values in slices[half:]], _nothing))
        elif how == "late":
            other.arrive(Piece(slices, _nothing, 0.005 + LATE_S * self.random()))

    def _left(self, parcel: Parcel) -> None:
        if not self._end.is_torn and not self.session.is_over:
            self._end.end()
            self.session.left(parcel)
            self._go_on()
            self._on_change(self)

    def _watch(self) -> None:
        """The live loop asks all the time; here, once it must be over, whichever clock is asked."""
        if self._end.busy_since >= 0.0 and not self._is_watched:
            self._is_watched = True
            self.writer.after(
                max(0.0, self._end.busy_since + 1.05 * PATIENCE_S - self.world.queue.now), self._look
            )

    def _look(self) -> None:
        self._is_watched = False
        if self._end.is_torn:
            return
        self._on_change(self)
        if not self._end.is_torn and 0.0 <= self._end.busy_since < self.world.queue.now - 1.04 * PATIENCE_S:
            self.world.violated(
                f"{self.writer.name}: it waits for {self.peer} at the other end of a communicator, "
                "and no time ends that"
            )
        elif not self._end.is_torn:
            self._watch()


class RendezvousTarget(NcclTarget):
    """The receiving end of all writers."""

    def __init__(self, process: WorkerRole) -> None:
        self._process, self._world = process, process.world
        size = process.memory.block_size
        self._writing = _Writing(process)
        super().__init__("cpu", self._writing, (0, NUM_LAYERS, size), self._make)  # type: ignore[arg-type]
        self._news.close()
        self._news = _News(process)  # type: ignore[assignment]
        self._open: list[Session] = []

    def left_over(self) -> Iterator[Session]:
        """Those whose communicator is there, though the sending end has closed its own, and its process
        lives."""
        for session in self._open:
            other = _end_of(session).other
            if not session.is_over and other is not None and other.is_torn and other.process.alive:
                yield session

    def receive(self, peer: PeerId, message: Message) -> None:
        super().receive(peer, message)
        for session in list(self._open):
            self._go_on(session)

    def over(self, session: Session, reason: str = "") -> bool:
        is_first = super().over(session, reason)
        self._world.counts["communicators torn down"] += is_first
        if is_first:
            self._open.remove(session)
        return is_first

    def _make(self, rank: int, send_entry: Any, carry_next: Any, failed: Any) -> CommunicatorEnd:
        (session,) = send_entry.args

        def go_on() -> None:
            self._go_on(session)

        end = CommunicatorEnd(self._process, go_on, failed, go_on)
        self._open.append(session)
        send_entry("1", str(end.number).encode())
        return end

    def _go_on(self, session: Session) -> None:
        """With what is to be received next; with what has come of it."""
        end = _end_of(session)
        if end.is_torn or end.is_receiving or not session.coming:
            return
        if end.busy_since < 0.0:
            end.begin()
        if end.pieces:
            end.is_receiving = True
            piece = end.pieces.popleft()
            self._process.after(
                0.0005 * self._world.random.random() + piece.takes_s, self._has_come, session, end, piece
            )

    def _has_come(self, session: Session, end: CommunicatorEnd, piece: Piece) -> None:
        """Also when it has been torn down since: then what comes is a late collective of an old
        communicator."""
        if end.is_torn and self._world.random.random() < 0.5:
            return
        self._world.counts["late collectives"] += end.is_torn
        end.is_receiving = False
        end.end()
        claim = session.coming[0][1] if session.coming else None
        if claim is not None and claim.valid:
            if sum(map(len, piece.slices)) != claim.header.length * len(claim.blocks):
                self.broke(session, "a piece of another size came")
                return
            self._writing.lease = claim.header.lease
        self.received(session, piece.slices)  # type: ignore[arg-type]
        piece.received()
        self._go_on(session)


class _Writing:
    """The pool, as a communicator writes it. ``lease``: of the next piece."""

    def __init__(self, process: WorkerRole) -> None:
        self._process, self.lease = process, 0

    def unpack(self, slices: list[list[int]], blocks: list[int], layers: slice) -> None:
        start = layers.start * self._process.memory.block_size
        self._process.written_by_itself(self.lease, blocks, start, slices)


class _News:
    """A ``Wakeup`` of virtual time."""

    def __init__(self, process: WorkerRole) -> None:
        self._process, self.fd = process, process.world.next_number()

    def set(self) -> None:
        self._process.network.readable.add(self.fd)
        self._process.after(0.0, self._process.poll)

    def clear(self) -> None:
        self._process.network.readable.discard(self.fd)


def _end_of(session: Session) -> CommunicatorEnd:
    return session.end  # type: ignore[return-value]


def _nothing() -> None:
    """It has left already."""
