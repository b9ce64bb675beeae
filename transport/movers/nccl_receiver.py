"""The decisions of the ``nccl`` mover's receiving end: the sessions of all writers. Pure; nccl.py carries
them out.

The first message of a session begins it, and ends the same writer's session before. A parcel is received
beside the pool and written there only while its lease stands and its session is not over: a communicator that
was given up may deliver anything, as late as it likes. A gap in the numbers means that announcements, and
with them the order, were lost."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ..messages.incarnation import is_earlier
from ..messages.messages import Message, ParcelComing, PeerId, RendezvousEntry, SessionOver, from_u32
from .interface import Arrival
from .lease_book import Claim, LeaseBook, ParcelHeader

MAX_WAITING = 1 << 16  # parcels announced and not received; more end the session
MAX_REASON = 4096  # characters


@dataclass(frozen=True, slots=True)
class ComingParcel:
    """An announced parcel; without a claim it is received and dropped."""

    number: int
    num_bytes: int
    layers: slice
    claim: Claim | None


@dataclass(eq=False, slots=True)
class ReceivingSession:
    """The receiving end of one communicator."""

    peer: PeerId
    number: int
    is_over: bool = False
    coming: deque[ComingParcel] = field(default_factory=deque)
    receiving: ComingParcel | None = None
    num_announced: int = 0


class BeginSession(NamedTuple):
    """Make a communicator with the peer, then receive what ``next`` returns."""

    session: ReceivingSession


class PassEntry(NamedTuple):
    """Pass the other end's entry to this end of the communicator."""

    session: ReceivingSession
    key: str
    value: bytes


class Receive(NamedTuple):
    """``next`` has something to return."""

    session: ReceivingSession


class EndSession(NamedTuple):
    """Tear the communicator down, whatever it does."""

    session: ReceivingSession


SessionAction: TypeAlias = BeginSession | PassEntry | Receive | EndSession


class ReceivingSessions:
    """All writers' sessions. Feed it, carry out ``take``, send ``words``. ``dropped``: parcels by reason."""

    def __init__(self, book: LeaseBook, num_layers: int, layer_bytes: int, parcel_bytes: int) -> None:
        """``parcel_bytes``: upper bound of a parcel, if a block is not larger."""
        self.dropped: Counter[str] = Counter()
        self._book, self._num_layers, self._layer_bytes = book, num_layers, layer_bytes
        self._parcel_bytes = max(parcel_bytes, num_layers * layer_bytes)
        self._met: set[PeerId] = set()
        self._sessions: dict[PeerId, ReceivingSession] = {}
        self._words: list[tuple[PeerId, Message]] = []
        self._actions: list[SessionAction] = []

    def meet(self, peer: PeerId) -> None:
        """Accept messages of this peer."""
        self._met.add(peer)

    def shut_out(self, peer: PeerId) -> None:
        """End the peer's session and ignore its messages."""
        self._met.discard(peer)
        if (session := self._sessions.pop(peer, None)) is not None:
            self._end(session, "it has been shut out")

    def end_all(self) -> None:
        for session in self._sessions.values():
            self._end(session, "the decode worker ends")

    def receive(self, peer: PeerId, message: Message) -> None:
        """Take one of BETWEEN_MOVERS; its content is checked."""
        if peer not in self._met or not isinstance(message, RendezvousEntry | ParcelComing | SessionOver):
            return
        session = self._sessions.get(peer)
        if session is None or session.number != message.session:
            if isinstance(message, SessionOver) or (session is not None and message.session < session.number):
                return
            session = self._begin(peer, message.session)
        if session.is_over:
            return
        if isinstance(message, RendezvousEntry):
            self._actions.append(PassEntry(session, message.key, message.value))
        elif isinstance(message, ParcelComing):
            self._announced(session, message)
        else:
            self._end(session, "")

    def take(self) -> list[SessionAction]:
        """Actions to carry out since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def take_messages(self) -> list[tuple[PeerId, Message]]:
        """Messages to send since the last call, in order."""
        words, self._words = self._words, []
        return words

    def entry(self, session: ReceivingSession, key: str, value: bytes) -> None:
        """Queue a store entry for the other end."""
        self._words.append((session.peer, RendezvousEntry(session=session.number, key=key, value=value)))

    def next(self, session: ReceivingSession) -> ComingParcel | None:
        """The parcel to receive now; None: none yet, or none ever (``is_over``)."""
        if session.is_over or session.receiving is not None or not session.coming:
            return None
        session.receiving = session.coming.popleft()
        return session.receiving

    def received(self, session: ReceivingSession) -> ComingParcel | None:
        """The parcel from ``next`` has come. It is returned if it may be written: at once, then
        ``written``."""
        parcel, session.receiving = session.receiving, None
        return parcel if parcel is not None and parcel.claim is not None and parcel.claim.valid else None

    def written(self, parcel: ComingParcel) -> list[Arrival]:
        """Blocks completed by this parcel."""
        assert parcel.claim is not None, "only claimed parcels are written"
        return self._book.complete(parcel.claim)

    def broke(self, session: ReceivingSession, reason: str) -> bool:
        """Note that the communicator is broken. False if the session was over already."""
        return self._end(session, reason or "it broke")

    def _begin(self, peer: PeerId, number: int) -> ReceivingSession:
        for other in [p for p in self._sessions if p[0] == peer[0] and not is_earlier(peer[1], p[1])]:
            self._end(self._sessions.pop(other), "a newer one has begun")
        one_name = (p for p in self._met if p[0] != peer[0] or p == peer or is_earlier(peer[1], p[1]))
        self._met = set(one_name)  # of each worker
        session = self._sessions[peer] = ReceivingSession(peer, number)
        self._actions.append(BeginSession(session))
        return session

    def _announced(self, session: ReceivingSession, message: ParcelComing) -> None:
        if message.number != session.num_announced or len(session.coming) >= MAX_WAITING:
            self._end(session, "announcements were lost")
        elif (parcel := self._parcel(message)) is None:
            self._end(session, "a parcel was announced that cannot be")
        else:
            session.num_announced += 1
            session.coming.append(parcel)
            self._actions.append(Receive(session))

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

    def _end(self, session: ReceivingSession, reason: str) -> bool:
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
            self._words.append((session.peer, over))
        self._actions.append(EndSession(session))
        return True
