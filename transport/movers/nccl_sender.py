"""The decisions of the ``nccl`` mover's sending end: the life of a communicator. Pure; nccl.py carries them
out.

    MEETING -- met --> IDLE <-- left -- LEAVING     one parcel at a time, as they were announced
       any -- broke, SessionOver, hung --> FAILED   ``poll`` raises; the next meeting begins another session
       any -- close --> CLOSED                      and SessionOver is sent

Every parcel is announced over the control channel when it is put, and numbered: it leaves whatever becomes of
its lease."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MoverError
from ..messages.messages import Message, ParcelComing, RendezvousEntry, SessionOver, u32
from .interface import Arrival, Item


@dataclass(frozen=True, slots=True)
class LeavingParcel:
    """These layers of own blocks, for these positions of a lease."""

    number: int
    lease: int
    positions: list[int]
    blocks: list[int]
    layers: slice


class SendingSession:
    """Feed it events; send its ``words`` and what ``next`` returns. ``number`` grows by session."""

    def __init__(self, number: int, patience_s: float, now: float) -> None:
        """``patience_s``: a meeting or a parcel that takes longer has failed."""
        self.number = number
        self._patience_s, self._since = patience_s, now  # since: start of the current meeting or parcel
        self._failure = ""
        self._is_met = self._is_closed = False
        self._waiting: deque[LeavingParcel] = deque()
        self._leaving: LeavingParcel | None = None
        self._left: list[Arrival] = []
        self._num_announced = 0
        self._words: list[Message] = []

    @property
    def is_over(self) -> bool:
        """True once nothing leaves any more."""
        return self._is_closed or bool(self._failure)

    @property
    def num_pending(self) -> int:
        """Blocks of parcels that have not left."""
        leaving = [self._leaving] if self._leaving is not None else []
        return sum(len(parcel.positions) for parcel in (*self._waiting, *leaving))

    @property
    def hangs_at(self) -> float | None:
        """Time at which ``poll`` gives up the meeting or parcel under way; None without one."""
        busy = not self.is_over and (self._leaving is not None or not self._is_met)
        return self._since + self._patience_s if busy else None

    def put(self, lease: int, secret: bytes, parcels: Sequence[Sequence[Item]], layers: slice) -> None:
        """Queue and announce parcels. MoverError once the session is over."""
        self._raise_failure()
        for part in parcels:
            number, positions = self._num_announced, [item[0] for item in part]
            self._num_announced += 1
            self._waiting.append(LeavingParcel(number, lease, positions, [item[1] for item in part], layers))
            self._words.append(
                ParcelComing(
                    session=self.number,
                    number=number,
                    lease=lease,
                    secret=secret,
                    first_layer=layers.start,
                    num_layers=layers.stop - layers.start,
                    positions=u32(positions),
                )
            )

    def cancel(self, lease: int) -> None:
        """Do not report this lease's parcels as left."""
        self._left = [arrival for arrival in self._left if arrival[0] != lease]

    def receive(self, message: Message) -> RendezvousEntry | None:
        """Take a message; return the entry for this end of the communicator, if it is one."""
        if isinstance(message, RendezvousEntry) and message.session == self.number:
            return message
        if isinstance(message, SessionOver) and message.session == self.number:
            self.fail(f"the decode worker has ended the communicator: {message.reason}")
        return None

    def take_messages(self) -> list[Message]:
        """Messages to send since the last call, in order."""
        words, self._words = self._words, []
        return words

    def poll(self, now: float) -> list[Arrival]:
        """Blocks that have left since the last call. MoverError once the session is over."""
        if (hangs_at := self.hangs_at) is not None and now > hangs_at:
            self.fail("the communicator hangs")
        self._raise_failure()
        left, self._left = self._left, []
        return left

    def close(self) -> None:
        """End the session, with a SessionOver to the other end."""
        if not self._is_closed:
            self._is_closed = True
            self._words = [SessionOver(session=self.number, reason="the sending end has closed it")]
        self._waiting.clear()

    def entry(self, key: str, value: bytes) -> None:
        """Queue a store entry for the other end."""
        self._words.append(RendezvousEntry(session=self.number, key=key, value=value))

    def met(self) -> None:
        """Note that both ends have found each other."""
        self._is_met = True

    def next(self, now: float) -> LeavingParcel | None:
        """The parcel to send now, if any."""
        if self.is_over or not self._is_met or self._leaving is not None or not self._waiting:
            return None
        self._leaving, self._since = self._waiting.popleft(), now
        return self._leaving

    def left(self) -> None:
        """Note that the parcel from ``next`` has left."""
        assert self._leaving is not None, "no parcel was being sent"
        self._left += [(self._leaving.lease, position) for position in self._leaving.positions]
        self._leaving = None

    def fail(self, reason: str) -> None:
        """Note that the communicator is broken."""
        self._failure = self._failure or reason

    def _raise_failure(self) -> None:
        if self._failure:
            raise MoverError(self._failure)
