"""The receiving end of the ``nccl`` mover: the sessions of all writers.

The first message of a session begins it, and ends the same writer's session before. A parcel is received
beside the pool and written there only while its lease stands and its session is not over: a communicator that
was given up may deliver any data, however late. A gap in the numbers means that announcements, and with them
the order, were lost.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from ...messages.fields import is_earlier
from ...messages.messages import Message, ParcelComing, PeerId, RendezvousEntry, SessionOver, from_u32
from ..block_memory import BlockMemory
from ..lease_book import PARCEL_BYTES, BookedTarget, Claim, LeaseBook, ParcelHeader
from .communicator import CLOSE_S, Communicator, CommunicatorThread, place_of

MAX_WAITING = 1 << 16  # parcels announced and not received; more end the session
MAX_REASON = 4096  # characters
_log = logging.getLogger(__name__)


class End(Protocol):
    """This end of a communicator."""

    def receive(self, key: str, value: bytes) -> None:
        """Take a rendezvous entry of the other end."""


E = TypeVar("E", bound=End)


@dataclass(frozen=True, slots=True)
class ComingParcel:
    """An announced parcel; without a claim it is received and dropped."""

    number: int
    num_bytes: int
    layers: slice
    claim: Claim | None


@dataclass(eq=False, slots=True)
class ReceivingSession(Generic[E]):
    """The receiving end of one communicator."""

    peer: PeerId
    number: int
    end: E = field(init=False)
    is_over: bool = False
    coming: deque[ComingParcel] = field(default_factory=deque)
    receiving: ComingParcel | None = None
    num_announced: int = 0


class ReceivingSessions(Generic[E]):
    """All writers' sessions. Pure. ``dropped``: parcels by reason. ``ended``: sessions whose communicator is
    to be torn down."""

    def __init__(
        self,
        book: LeaseBook,
        num_layers: int,
        layer_bytes: int,
        parcel_bytes: int,
        make_end: Callable[[ReceivingSession[E]], E],
    ) -> None:
        """``parcel_bytes``: upper bound of a parcel, if a block is not larger. ``make_end`` begins to make a
        communicator with the peer; it then receives the parcels that ``next`` returns."""
        self.dropped: Counter[str] = Counter()
        self.sessions: dict[PeerId, ReceivingSession[E]] = {}
        self.ended: list[ReceivingSession[E]] = []
        self._book, self._num_layers, self._layer_bytes = book, num_layers, layer_bytes
        self._parcel_bytes, self._make_end = max(parcel_bytes, num_layers * layer_bytes), make_end
        self._met: set[PeerId] = set()
        self._messages: list[tuple[PeerId, Message]] = []

    def meet(self, peer: PeerId) -> None:
        """Accept messages of this peer."""
        self._met.add(peer)

    def shut_out(self, peer: PeerId) -> None:
        """End the peer's session and ignore its messages."""
        self._met.discard(peer)
        if (session := self.sessions.pop(peer, None)) is not None:
            self._end(session, "it has been shut out")

    def end_all(self) -> None:
        for session in self.sessions.values():
            self._end(session, "the decode worker ends")

    def receive(self, peer: PeerId, message: Message) -> None:
        """Take one of BETWEEN_MOVERS; its content is checked."""
        if peer not in self._met or not isinstance(message, RendezvousEntry | ParcelComing | SessionOver):
            return
        session = self.sessions.get(peer)
        if session is None or session.number != message.session:
            if isinstance(message, SessionOver) or (session is not None and message.session < session.number):
                return
            session = self._begin(peer, message.session)
        if session.is_over:
            return
        if isinstance(message, RendezvousEntry):
            session.end.receive(message.key, message.value)
        elif isinstance(message, SessionOver):
            self._end(session, "")
        elif message.number != session.num_announced or len(session.coming) >= MAX_WAITING:
            self._end(session, "announcements were lost")
        elif (parcel := self._parcel(message)) is None:
            self._end(session, "a parcel was announced that cannot be")
        else:
            session.num_announced += 1
            session.coming.append(parcel)

    def take_messages(self) -> list[tuple[PeerId, Message]]:
        """Return the messages to send since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def send_entry(self, session: ReceivingSession[E], key: str, value: bytes) -> None:
        """Queue a rendezvous entry for the other end."""
        self._messages.append((session.peer, RendezvousEntry(session=session.number, key=key, value=value)))

    def next(self, session: ReceivingSession[E]) -> ComingParcel | None:
        """Return the parcel to receive now; None: none yet, or none ever (``is_over``)."""
        if session.is_over or session.receiving is not None or not session.coming:
            return None
        session.receiving = session.coming.popleft()
        return session.receiving

    def received(self, session: ReceivingSession[E]) -> Claim | None:
        """Note that the parcel from ``next`` has come. Return its claim if it may be written: at once, then
        ``LeaseBook.complete``."""
        parcel, session.receiving = session.receiving, None
        claim = parcel.claim if parcel is not None else None
        return claim if claim is not None and claim.valid else None

    def broke(self, session: ReceivingSession[E], reason: str) -> bool:
        """Note that the communicator is broken. Return False if the session was over already."""
        return self._end(session, reason or "it broke")

    def _begin(self, peer: PeerId, number: int) -> ReceivingSession[E]:
        for other in [p for p in self.sessions if p[0] == peer[0] and not is_earlier(peer[1], p[1])]:
            self._end(self.sessions.pop(other), "a newer one has begun")
        one_name = (p for p in self._met if p[0] != peer[0] or p == peer or is_earlier(peer[1], p[1]))
        self._met = set(one_name)  # of each worker
        session = self.sessions[peer] = ReceivingSession(peer, number)
        session.end = self._make_end(session)
        return session

    def _parcel(self, message: ParcelComing) -> ComingParcel | None:
        positions, size = tuple(from_u32(message.positions)), self._layer_bytes
        first, count = message.first_layer, message.num_layers
        num_bytes = len(positions) * count * size
        if not (0 < count <= self._num_layers - first and 0 < num_bytes <= self._parcel_bytes):
            return None
        header = ParcelHeader(message.lease, message.secret, first * size, count * size, positions)
        claim = self._book.claim(header)
        if isinstance(claim, str):
            self.dropped[claim] += 1
        granted = None if isinstance(claim, str) else claim
        return ComingParcel(message.number, num_bytes, slice(first, first + count), granted)

    def _end(self, session: ReceivingSession[E], reason: str) -> bool:
        """End the session; send the peer ``reason`` unless it is empty. False if it was over already."""
        if session.is_over:
            return False
        session.is_over = True
        for parcel in (*session.coming, *([session.receiving] if session.receiving is not None else [])):
            if parcel.claim is not None:
                self._book.give_back(parcel.claim)
        session.coming.clear()
        session.receiving = None
        if reason:
            over = SessionOver(session=session.number, reason=reason[:MAX_REASON])
            self._messages.append((session.peer, over))
        self.ended.append(session)
        return True


class NcclTarget(BookedTarget):
    """For all writers: their sessions, and a communicator and a thread for each. ``shape`` is the pool's."""

    def __init__(self, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        super().__init__(shape[1], shape[2])
        self._memory, self._changed = memory, threading.Condition(self._lock)
        self._sessions = ReceivingSessions(self._book, shape[1], shape[2], PARCEL_BYTES, self._begin)

    @property
    def dropped(self) -> Counter[str]:
        """Parcels dropped, by reason."""
        return self._sessions.dropped

    def address(self, peer: PeerId) -> bytes:
        with self._lock:
            self._sessions.meet(peer)
        return place_of(self._memory.device).encode()

    def shut_out(self, peer: PeerId) -> bool:
        """True at once: only this process writes."""
        with self._lock:
            self._sessions.shut_out(peer)
        self._tear_down()
        return True

    def receive(self, peer: PeerId, message: Message) -> None:
        with self._lock:
            self._sessions.receive(peer, message)
        self._tear_down()

    def take_messages(self) -> list[tuple[PeerId, Message]]:
        self._tear_down()
        with self._lock:
            return self._sessions.take_messages()

    def close_all(self) -> None:
        self._close_book()
        with self._lock:
            self._sessions.end_all()
        self._tear_down()
        for session in self._sessions.sessions.values():
            session.end.join(CLOSE_S)

    def _tear_down(self) -> None:
        with self._lock:
            ended, self._sessions.ended = self._sessions.ended, []
            self._changed.notify_all()
        for session in ended:
            session.end.tear_down()

    def _begin(self, session: ReceivingSession[CommunicatorThread]) -> CommunicatorThread:
        def send_entry(key: str, value: bytes) -> None:
            with self._lock:
                self._sessions.send_entry(session, key, value)
                self._news.set()

        def failed(reason: str) -> None:
            with self._lock:
                is_news = self._sessions.broke(session, reason)
                self._news.set()
            if is_news:
                _log.warning("the communicator with %s broke: %s", session.peer[0], reason)

        def carry_next(communicator: Communicator) -> bool:
            return self._receive_next(session, communicator)

        thread = CommunicatorThread(1, self._memory.device, send_entry, carry_next, failed)
        thread.start()
        return thread

    def _receive_next(
        self, session: ReceivingSession[CommunicatorThread], communicator: Communicator
    ) -> bool:
        with self._changed:
            while (coming := self._sessions.next(session)) is None:
                if session.is_over:
                    return False
                self._changed.wait()
        packed = torch.empty(coming.num_bytes, dtype=torch.uint8, device=self._memory.device)
        communicator.receive(packed, coming.number)
        with self._lock:
            if (claim := self._sessions.received(session)) is not None:
                self._memory.unpack(packed, claim.blocks, coming.layers)
                self._arrived(self._book.complete(claim))
        return True
