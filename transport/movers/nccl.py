"""The ``nccl`` mover: packed blocks, in the clear, by a communicator of two ranks for each pair of workers.
Its life is a *session*; its rendezvous travels over the workers' encrypted control channel.

    MEETING -- next --> IDLE <-- left / next --> LEAVING    parcels leave in the order of their announcements
       any -- fail, SessionOver, hangs --> FAILED           ``poll`` raises; another meeting begins another
       any -- close --> CLOSED                              and SessionOver is sent

Every parcel is announced over the control channel when it is put, and numbered: a gap means that
announcements were lost, and with them the order. It leaves even if its lease is cancelled. The other end
receives it beside the pool and writes it only while its lease stands and its session is not over: a
communicator that was given up may deliver any data, however late.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ..errors import MoverError
from ..messages.fields import is_earlier
from ..messages.messages import Message, ParcelComing, PeerId, RendezvousEntry, SessionOver, from_u32, u32
from .interface import Arrival
from .lease_book import PARCEL_BYTES, BookedTarget, Claim, ParcelHeader
from .parcel_source import Parcel, ParcelSource

if TYPE_CHECKING:
    from torch import Tensor

    from .block_memory import BlockMemory
    from .communicator import Communicator

CLOSE_S = 0.2
MAX_REASON = 4096  # characters
_numbers = itertools.count(time.time_ns())  # of sessions: greater than all before, also after a restart
_log = logging.getLogger(__name__)
MakeEnd: TypeAlias = "Callable[..., Communicator]"
"""Begins to make one: (rank, send_entry, carry_next, failed)."""


class NcclSource(ParcelSource):
    """One for each decode worker: a session, and the rank that sends its parcels."""

    def __init__(
        self, address: bytes, place: str, memory: BlockMemory, shape: tuple[int, ...], make_end: MakeEnd
    ) -> None:
        """``shape``: of the own pool; ``place``: its ``place_of``. MoverError where the peer's pool lies on
        another kind of device, or on the same GPU."""
        theirs = address.decode(errors="replace")
        if place.split()[:1] != theirs.split()[:1]:
            raise MoverError(f"nccl needs pools of one kind; here it is {place}, at the peer {theirs}")
        if place.startswith("cuda") and place == theirs:
            raise MoverError("NCCL connects no two processes on one GPU: use cuda_ipc there")
        super().__init__(shape)
        self.number, self._announced = next(_numbers), itertools.count()
        self._memory, self._messages = memory, list[Message]()
        self.end = make_end(0, self.send_entry, self._send_next, self.broke)

    def receive(self, message: Message) -> None:
        if isinstance(message, RendezvousEntry) and message.session == self.number:
            self.end.take_entry(message.key, message.value)
        if isinstance(message, SessionOver) and message.session == self.number:
            self.fail(f"the decode worker has ended the communicator: {message.reason}")

    def take_messages(self) -> list[Message]:
        with self._changed:
            messages, self._messages = self._messages, []
            return messages

    def poll(self) -> list[Arrival]:
        if not self.is_over and self.end.hangs:
            self.fail("the communicator hangs")
        return super().poll()

    def close(self) -> tuple[()]:
        self._close()
        self._messages = [SessionOver(session=self.number, reason="the sending end has closed it")]
        self.end.tear_down()
        self.end.join(CLOSE_S)  # one that waits for the peer ends by its own time-out
        return ()

    def send_entry(self, key: str, value: bytes) -> None:
        with self._changed:
            self._messages.append(RendezvousEntry(session=self.number, key=key, value=value))

    def broke(self, reason: str) -> None:
        self.fail(f"the communicator with the decode worker broke: {reason}")

    def _send_next(self, end: Communicator) -> bool:
        if (parcel := self.wait_for_next()) is None:
            return False
        end.send(self._memory.pack(parcel.blocks, parcel.layers))
        self.left(parcel)
        return True

    def _queued(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            coming = ParcelComing(
                session=self.number,
                number=next(self._announced),
                lease=parcel.lease,
                secret=parcel.secret,
                first_layer=parcel.layers.start,
                num_layers=parcel.layers.stop - parcel.layers.start,
                positions=u32(parcel.positions),
            )
            self._messages.append(coming)


@dataclass(eq=False, slots=True)
class Session:
    """The receiving end. ``coming``: announced parcels; one without a claim is received and dropped."""

    peer: PeerId
    number: int
    end: Communicator = field(init=False)
    is_over: bool = False
    coming: deque[tuple[ParcelHeader, Claim | None]] = field(default_factory=deque)
    num_announced: int = 0


class NcclTarget(BookedTarget):
    """For all writers: of each that has been met, its latest session, if any. ``shape`` is the pool's."""

    def __init__(self, place: str, memory: BlockMemory, shape: tuple[int, ...], make_end: MakeEnd) -> None:
        _, self._num_layers, self._layer_bytes = shape
        super().__init__(self._num_layers, self._layer_bytes)
        self._place, self._memory, self._make_end = place, memory, make_end
        self._changed = threading.Condition(self._lock)
        self.sessions: dict[PeerId, Session | None] = {}
        self._messages: list[tuple[PeerId, Message]] = []

    def address(self, peer: PeerId) -> bytes:
        with self._lock:
            self.sessions.setdefault(peer, None)
        return self._place.encode()

    def shut_out(self, peer: PeerId, reason: str = "it has been shut out") -> bool:
        """True at once: only this process writes."""
        with self._lock:
            if (session := self.sessions.pop(peer, None)) is not None:
                self.over(session, reason)
        return True

    def receive(self, peer: PeerId, message: Message) -> None:
        """The first message of a session begins it, and ends the same worker's session before."""
        with self._lock:
            if peer in self.sessions and isinstance(message, RendezvousEntry | ParcelComing | SessionOver):
                session = self.sessions[peer]
                if session is None or session.number < message.session:
                    session = None if isinstance(message, SessionOver) else self._begin(peer, message.session)
                if session is not None and session.number == message.session and not session.is_over:
                    self._take(session, message)

    def take_messages(self) -> list[tuple[PeerId, Message]]:
        with self._lock:
            messages, self._messages = self._messages, []
            return messages

    def close_all(self) -> None:
        self._close_book()
        sessions = [session for session in self.sessions.values() if session is not None]
        for session in sessions:
            self.over(session, "the decode worker ends")
        for session in sessions:
            session.end.join(CLOSE_S)

    def over(self, session: Session, reason: str = "") -> bool:
        """End the session and send the peer the reason, if any. Return False if it was over already."""
        with self._lock:
            if session.is_over:
                return False
            session.is_over = True
            for _, claim in session.coming:
                if claim is not None:
                    self._book.give_back(claim)
            session.coming.clear()
            self._changed.notify_all()
            session.end.tear_down()
            if reason:
                self._send(session, SessionOver(session=session.number, reason=reason[:MAX_REASON]))
        return True

    def send_entry(self, session: Session, key: str, value: bytes) -> None:
        self._send(session, RendezvousEntry(session=session.number, key=key, value=value))

    def broke(self, session: Session, reason: str) -> None:
        if self.over(session, reason):
            _log.warning("the communicator with %s broke: %s", session.peer[0], reason)

    def received(self, session: Session, packed: Tensor) -> None:
        """The next parcel has come: write it, if it may be."""
        with self._lock:
            claim = session.coming.popleft()[1] if session.coming else None
            if claim is not None and claim.valid:
                start, end = claim.header.offset, claim.header.offset + claim.header.length
                layers = slice(start // self._layer_bytes, end // self._layer_bytes)
                self._memory.unpack(packed, claim.blocks, layers)
                self._arrived(self._book.complete(claim))

    def _receive_next(self, session: Session, end: Communicator) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: session.coming or session.is_over)
            if session.is_over:
                return False
            header = session.coming[0][0]
        self.received(session, end.receive(header.length * len(header.positions)))
        return True

    def _send(self, session: Session, message: Message) -> None:
        with self._lock:
            self._messages.append((session.peer, message))
            self._news.set()

    def _take(self, session: Session, message: RendezvousEntry | ParcelComing | SessionOver) -> None:
        if isinstance(message, RendezvousEntry):
            session.end.take_entry(message.key, message.value)
        elif isinstance(message, SessionOver):
            self.over(session)
        elif message.number != session.num_announced:
            self.over(session, "announcements were lost")
        elif (header := self._header(message)) is None:
            self.over(session, "a parcel was announced that cannot be")
        else:
            session.num_announced += 1
            session.coming.append((header, self._book.claim(header)))
            self._changed.notify_all()

    def _begin(self, peer: PeerId, number: int) -> Session:
        for other in [p for p in self.sessions if p[0] == peer[0] and not is_earlier(peer[1], p[1])]:
            self.shut_out(other, "a newer one has begun")
        session = self.sessions[peer] = Session(peer, number)
        calls = (partial(call, session) for call in (self.send_entry, self._receive_next, self.broke))
        session.end = self._make_end(1, *calls)
        return session

    def _header(self, message: ParcelComing) -> ParcelHeader | None:
        positions, size = tuple(from_u32(message.positions)), self._layer_bytes
        first, count = message.first_layer, message.num_layers
        num_bytes, limit = len(positions) * count * size, max(PARCEL_BYTES, self._num_layers * size)
        if not (0 < count <= self._num_layers - first and 0 < num_bytes <= limit):
            return None
        return ParcelHeader(message.lease, message.secret, first * size, count * size, positions)
