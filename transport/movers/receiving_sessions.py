"""The ``nccl`` mover's receiving end, what it decides: the sessions of all writers. Pure; nccl_target.py does it.

The first word of a session begins it, and ends the same writer's one before. What is announced is received in that order, each piece beside
the pool, and written there only while its lease stands and its session is not over: so a communicator that has been given up may bring
what it likes, as late as it likes. A gap in the numbers means that announcements were lost, and with them the order of what comes.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ..channels.incarnation import is_earlier
from ..handoff.handoff import PeerId
from ..messages.messages import Message, ParcelComing, RendezvousEntry, SessionOver, from_u32
from .interface import Arrival
from .lease_book import Claim, LeaseBook
from .parcel import ParcelHeader

MAX_WAITING = 1 << 16  # parcels announced and not received: a peer that announces more has its session ended
MAX_REASON = 4096  # characters


@dataclass(frozen=True, slots=True)
class ComingParcel:
    """A parcel that has been announced; without a claim it is received and thrown away."""

    number: int
    num_bytes: int
    layers: slice
    claim: Claim | None


@dataclass(eq=False, slots=True)
class ReceivingSession:
    """Of one communicator."""

    peer: PeerId
    number: int
    is_over: bool = False
    coming: deque[ComingParcel] = field(default_factory=deque)
    receiving: ComingParcel | None = None
    num_announced: int = 0


class BeginSession(NamedTuple):
    """Make a communicator with the peer, then receive what ``next`` gives."""

    session: ReceivingSession


class HearEntry(NamedTuple):
    """For our end of the communicator."""

    session: ReceivingSession
    key: str
    value: bytes


class Receive(NamedTuple):
    """``next`` has something to give."""

    session: ReceivingSession


class EndSession(NamedTuple):
    """Tear the communicator down, whatever it is at."""

    session: ReceivingSession


SessionAction: TypeAlias = BeginSession | HearEntry | Receive | EndSession


class ReceivingSessions:
    """Feed it, then carry out what ``take`` returns and say its ``words``. ``dropped`` counts parcels by what was wrong with them."""

    def __init__(self, book: LeaseBook, num_layers: int, layer_bytes: int, parcel_bytes: int) -> None:
        """``parcel_bytes``: the most that a parcel may bring, or a block's."""
        self.dropped: Counter[str] = Counter()
        self._book, self._num_layers, self._layer_bytes = book, num_layers, layer_bytes
        self._parcel_bytes = max(parcel_bytes, num_layers * layer_bytes)
        self._met: set[PeerId] = set()
        self._sessions: dict[PeerId, ReceivingSession] = {}
        self._words: list[tuple[PeerId, Message]] = []
        self._actions: list[SessionAction] = []

    def meet(self, peer: PeerId) -> None:
        """From now on this peer is heard."""
        self._met.add(peer)

    def shut_out(self, peer: PeerId) -> None:
        """Nothing of it is written, and it is heard no more."""
        self._met.discard(peer)
        if (session := self._sessions.pop(peer, None)) is not None:
            self._end(session, "it has been shut out")

    def end_all(self) -> None:
        for session in self._sessions.values():
            self._end(session, "the decode worker ends")

    def hear(self, peer: PeerId, message: Message) -> None:
        """One of BETWEEN_MOVERS; whatever it says is checked."""
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
            self._actions.append(HearEntry(session, message.key, message.value))
        elif isinstance(message, ParcelComing):
            self._announced(session, message)
        else:
            self._end(session, "")

    def take(self) -> list[SessionAction]:
        """What is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def words(self) -> list[tuple[PeerId, Message]]:
        """What is to be said since the last call, in order."""
        words, self._words = self._words, []
        return words

    # --- what becomes of a communicator ----------------------------------------------------------

    def entry(self, session: ReceivingSession, key: str, value: bytes) -> None:
        """Our end of it has this to say to the other."""
        self._words.append((session.peer, RendezvousEntry(session=session.number, key=key, value=value)))

    def next(self, session: ReceivingSession) -> ComingParcel | None:
        """What is to be received now; None: nothing (yet, or ever: ``is_over``)."""
        if session.is_over or session.receiving is not None or not session.coming:
            return None
        session.receiving = session.coming.popleft()
        return session.receiving

    def received(self, session: ReceivingSession) -> ComingParcel | None:
        """The parcel that ``next`` gave is there. It is to be written, at once, and then ``written`` to be said; None: nothing is."""
        parcel, session.receiving = session.receiving, None
        return parcel if parcel is not None and parcel.claim is not None and parcel.claim.valid else None

    def written(self, parcel: ComingParcel) -> list[Arrival]:
        """The blocks that are whole now."""
        assert parcel.claim is not None, "else it was not to be written"
        return self._book.complete(parcel.claim)

    def broke(self, session: ReceivingSession, reason: str) -> bool:
        """The communicator is of no use any more. False: that was known."""
        return self._end(session, reason or "it broke")

    def _begin(self, peer: PeerId, number: int) -> ReceivingSession:
        for other in [p for p in self._sessions if p[0] == peer[0] and not is_earlier(peer[1], p[1])]:
            self._end(self._sessions.pop(other), "a newer one has begun")
        self._met = {p for p in self._met if p[0] != peer[0] or p == peer or is_earlier(peer[1], p[1])}  # a worker has one name at a time
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
        num_bytes = len(positions) * message.num_layers * size
        if not (0 < message.num_layers <= self._num_layers - message.first_layer and 0 < num_bytes <= self._parcel_bytes):
            return None
        header = ParcelHeader(message.lease, message.secret, message.first_layer * size, message.num_layers * size, positions)
        claim = self._book.claim(header)
        layers = slice(message.first_layer, message.first_layer + message.num_layers)
        if isinstance(claim, str):
            self.dropped[claim] += 1
            return ComingParcel(message.number, num_bytes, layers, None)
        return ComingParcel(message.number, num_bytes, layers, claim)

    def _end(self, session: ReceivingSession, reason: str) -> bool:
        """``reason``, unless it is empty, is said to the peer. False: it was over."""
        if session.is_over:
            return False
        session.is_over = True
        for parcel in (*session.coming, *([session.receiving] if session.receiving is not None else [])):
            if parcel.claim is not None:
                self._book.give_back(parcel.claim)
        session.coming.clear()
        session.receiving = None
        if reason:
            self._words.append((session.peer, SessionOver(session=session.number, reason=reason[:MAX_REASON])))
        self._actions.append(EndSession(session))
        return True
