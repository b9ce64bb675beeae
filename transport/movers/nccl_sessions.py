"""What both ends of the ``nccl`` mover decide, without a communicator. The life of one is a *session*:

    MEETING -- met --> IDLE <-- left / next --> LEAVING    parcels leave in the order of their announcements
       any -- fail, SessionOver, hung --> FAILED           ``poll`` raises; another meeting begins another
       any -- close_session --> CLOSED                     and SessionOver is sent

Every parcel is announced over the control channel when it is put, and numbered: a gap means that
announcements were lost, and with them the order. It leaves even if its lease is cancelled. The other end
receives it beside the pool and writes it only while its lease stands and its session is not over: a
communicator that was given up may deliver any data, however late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..messages.fields import is_earlier
from ..messages.messages import Message, ParcelComing, PeerId, RendezvousEntry, SessionOver, from_u32, u32
from .interface import Arrival
from .lease_book import Claim, LeaseBook, ParcelHeader
from .parcel_source import Parcel, ParcelSource

MAX_WAITING = 1 << 16  # parcels announced and not received; more end the session
MAX_REASON = 4096  # characters


class SendingSession(ParcelSource):
    """The sending end; a subclass has the communicator. ``number`` grows by session."""

    def __init__(
        self, shape: Sequence[int], number: int, patience_s: float, clock: Callable[[], float]
    ) -> None:
        """``patience_s``: a meeting or a parcel that takes longer has failed."""
        super().__init__(shape)
        self.number, self._patience_s, self._clock = number, patience_s, clock
        self._since = clock()  # start of the current meeting or parcel
        self._is_met = False
        self._num_announced = 0
        self._messages: list[Message] = []

    @property
    def hangs_at(self) -> float | None:
        """Time at which ``poll`` gives up the meeting or parcel under way; None without one."""
        busy = not self.is_over and (self._leaving or not self._is_met)
        return self._since + self._patience_s if busy else None

    def entry_in(self, message: Message) -> RendezvousEntry | None:
        """Take a message. Return it if it is an entry for this end of the communicator."""
        if isinstance(message, RendezvousEntry) and message.session == self.number:
            return message
        if isinstance(message, SessionOver) and message.session == self.number:
            self.fail(f"the decode worker has ended the communicator: {message.reason}")
        return None

    def take_messages(self) -> list[Message]:
        with self._changed:
            messages, self._messages = self._messages, []
            return messages

    def send_entry(self, key: str, value: bytes) -> None:
        """Queue a rendezvous entry for the other end."""
        with self._changed:
            self._messages.append(RendezvousEntry(session=self.number, key=key, value=value))

    def poll(self) -> list[Arrival]:
        if (hangs_at := self.hangs_at) is not None and self._clock() > hangs_at:
            self.fail("the communicator hangs")
        return super().poll()

    def met(self) -> None:
        """Note that both ends have found each other."""
        self._is_met = True

    def next(self) -> Parcel | None:
        self._since = self._clock()
        return super().next()

    def close_session(self) -> None:
        self._close()
        self._messages = [SessionOver(session=self.number, reason="the sending end has closed it")]

    def _queued(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            coming = ParcelComing(
                session=self.number,
                number=self._num_announced,
                lease=parcel.lease,
                secret=parcel.secret,
                first_layer=parcel.layers.start,
                num_layers=parcel.layers.stop - parcel.layers.start,
                positions=u32(parcel.positions),
            )
            self._messages.append(coming)
            self._num_announced += 1


class ComingParcel(NamedTuple):
    """An announced parcel; without a claim it is received and dropped."""

    num_bytes: int
    layers: slice
    claim: Claim | None


class End(Protocol):
    """A communicator's receiving end."""

    def receive(self, key: str, value: bytes) -> None:
        """Take a rendezvous entry of the other end."""

    def expect(self, parcel: ComingParcel) -> None:
        """Receive this one after those before it, then call ``ReceivingSessions.received``."""

    def tear_down(self) -> None:
        """End the communicator. Returns at once."""


E = TypeVar("E", bound=End)


@dataclass(eq=False, slots=True)
class ReceivingSession(Generic[E]):
    """The receiving end of one communicator. ``coming``: parcels that are not received yet."""

    peer: PeerId
    number: int
    end: E = field(init=False)
    is_over: bool = False
    coming: deque[ComingParcel] = field(default_factory=deque)
    num_announced: int = 0


class ReceivingSessions(Generic[E]):
    """The receiving ends for all writers: for each that has been met, its latest session, if any."""

    def __init__(
        self,
        book: LeaseBook,
        num_layers: int,
        layer_bytes: int,
        parcel_bytes: int,
        make_end: Callable[[ReceivingSession[E]], E],
    ) -> None:
        """``parcel_bytes``: upper bound of a parcel, if a block is not larger. ``make_end`` begins to make a
        communicator with the peer."""
        self.sessions: dict[PeerId, ReceivingSession[E] | None] = {}
        self._book, self._num_layers, self._layer_bytes = book, num_layers, layer_bytes
        self._parcel_bytes, self._make_end = max(parcel_bytes, num_layers * layer_bytes), make_end
        self._messages: list[tuple[PeerId, Message]] = []

    def meet(self, peer: PeerId) -> None:
        """Accept messages of this peer."""
        self.sessions.setdefault(peer, None)

    def shut_out(self, peer: PeerId, reason: str = "it has been shut out") -> None:
        """End the peer's session and ignore its messages."""
        if (session := self.sessions.pop(peer, None)) is not None:
            self.end(session, reason)

    def receive(self, peer: PeerId, message: Message) -> None:
        """Take one of BETWEEN_MOVERS; its content is checked. The first one of a session begins it, and ends
        the same worker's session before."""
        if peer not in self.sessions or not isinstance(message, RendezvousEntry | ParcelComing | SessionOver):
            return
        session = self.sessions[peer]
        is_new = session is None or session.number < message.session
        if is_new and not isinstance(message, SessionOver):
            session = self._begin(peer, message.session)
        if session is None or session.number != message.session or session.is_over:
            return
        if isinstance(message, RendezvousEntry):
            session.end.receive(message.key, message.value)
        elif isinstance(message, SessionOver):
            self.end(session)
        elif message.number != session.num_announced or len(session.coming) >= MAX_WAITING:
            self.end(session, "announcements were lost")
        elif (parcel := self._parcel(message)) is None:
            self.end(session, "a parcel was announced that cannot be")
        else:
            session.num_announced += 1
            session.coming.append(parcel)
            session.end.expect(parcel)

    def take_messages(self) -> list[tuple[PeerId, Message]]:
        """Return the messages to send since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def send_entry(self, session: ReceivingSession[E], key: str, value: bytes) -> None:
        """Queue a rendezvous entry for the other end."""
        self._messages.append((session.peer, RendezvousEntry(session=session.number, key=key, value=value)))

    def received(self, session: ReceivingSession[E]) -> Claim | None:
        """Note that the next parcel has come. Return its claim if it may be written: at once, then
        ``LeaseBook.complete``."""
        claim = session.coming.popleft().claim if session.coming else None
        return claim if claim is not None and claim.valid else None

    def end(self, session: ReceivingSession[E], reason: str = "") -> bool:
        """End the session and send the peer the reason, if any. Return False if it was over already."""
        if session.is_over:
            return False
        session.is_over = True
        for parcel in session.coming:
            if parcel.claim is not None:
                self._book.give_back(parcel.claim)
        session.coming.clear()
        if reason:
            over = SessionOver(session=session.number, reason=reason[:MAX_REASON])
            self._messages.append((session.peer, over))
        session.end.tear_down()
        return True

    def _begin(self, peer: PeerId, number: int) -> ReceivingSession[E]:
        for other in [p for p in self.sessions if p[0] == peer[0] and not is_earlier(peer[1], p[1])]:
            self.shut_out(other, "a newer one has begun")
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
        return ComingParcel(num_bytes, slice(first, first + count), self._book.claim(header))
