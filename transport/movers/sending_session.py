"""The ``nccl`` mover's sending end, what it decides: the life of one communicator. Pure; nccl_source.py does it.

    MEETING -- met --> IDLE <-- left -- LEAVING     one parcel at a time, in the order in which they were announced
       any -- broke, SessionOver, hung --> FAILED   ``poll`` says so; the next meeting begins another session
       any -- close --> CLOSED                      and the other end is told

Every parcel is announced over the control channel when it is put, and from then on it is counted: it leaves, whatever becomes of its lease.
"""

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
    """Feed it; say its ``words``, send what ``next`` gives. ``number``: greater than that of any session before, with the same peer."""

    def __init__(self, number: int, patience_s: float, now: float) -> None:
        """``patience_s``: a meeting, or a parcel's leaving, that takes longer will never end."""
        self.number = number
        self._patience_s, self._since = patience_s, now  # when it began with what it does now
        self._failure = ""
        self._is_met = self._is_closed = False
        self._waiting: deque[LeavingParcel] = deque()
        self._leaving: LeavingParcel | None = None
        self._left: list[Arrival] = []
        self._num_announced = 0
        self._words: list[Message] = []

    @property
    def is_over(self) -> bool:
        """Nothing leaves any more."""
        return self._is_closed or bool(self._failure)

    @property
    def num_pending(self) -> int:
        """Blocks of parcels that have not left."""
        leaving = [self._leaving] if self._leaving is not None else []
        return sum(len(parcel.positions) for parcel in (*self._waiting, *leaving))

    @property
    def hangs_at(self) -> float | None:
        """When ``poll`` gives up what is under way; None where nothing is."""
        busy = not self.is_over and (self._leaving is not None or not self._is_met)
        return self._since + self._patience_s if busy else None

    def put(self, lease: int, secret: bytes, items: Sequence[Item], layers: slice, size: int) -> None:
        """In parcels of up to ``size`` blocks. Raises MoverError where the session is over."""
        self._raise_failure()
        for start in range(0, len(items), size):
            part = items[start : start + size]
            positions = [item[0] for item in part]
            self._waiting.append(LeavingParcel(self._num_announced, lease, positions, [item[1] for item in part], layers))
            self._words.append(
                ParcelComing(
                    session=self.number,
                    number=self._num_announced,
                    lease=lease,
                    secret=secret,
                    first_layer=layers.start,
                    num_layers=layers.stop - layers.start,
                    positions=u32(positions),
                )
            )
            self._num_announced += 1

    def cancel(self, lease: int) -> None:
        """That its parcels have left is of no interest any more."""
        self._left = [arrival for arrival in self._left if arrival[0] != lease]

    def hear(self, message: Message) -> RendezvousEntry | None:
        """What the other end says; an entry is for our end of the communicator."""
        if isinstance(message, RendezvousEntry) and message.session == self.number:
            return message
        if isinstance(message, SessionOver) and message.session == self.number:
            self.fail(f"the decode worker has ended the communicator: {message.reason}")
        return None

    def words(self) -> list[Message]:
        """What is to be said since the last call, in order."""
        words, self._words = self._words, []
        return words

    def poll(self, now: float) -> list[Arrival]:
        """What has left since the last call. Raises MoverError where the session is over."""
        if (hangs_at := self.hangs_at) is not None and now > hangs_at:
            self.fail("the communicator hangs")
        self._raise_failure()
        left, self._left = self._left, []
        return left

    def close(self) -> None:
        """Nothing more leaves."""
        if not self._is_closed:
            self._is_closed = True
            self._words = [SessionOver(session=self.number, reason="the sending end has closed it")]
        self._waiting.clear()

    # --- what becomes of the communicator --------------------------------------------------------

    def entry(self, key: str, value: bytes) -> None:
        """It has this to say to its other end."""
        self._words.append(RendezvousEntry(session=self.number, key=key, value=value))

    def met(self) -> None:
        """Both ends have found each other."""
        self._is_met = True

    def next(self, now: float) -> LeavingParcel | None:
        """What is to be sent now."""
        if self.is_over or not self._is_met or self._leaving is not None or not self._waiting:
            return None
        self._leaving, self._since = self._waiting.popleft(), now
        return self._leaving

    def left(self) -> None:
        """The parcel that ``next`` gave has left."""
        assert self._leaving is not None, "one was sent"
        self._left += [(self._leaving.lease, position) for position in self._leaving.positions]
        self._leaving = None

    def fail(self, reason: str) -> None:
        """The communicator is of no use any more."""
        self._failure = self._failure or reason

    def _raise_failure(self) -> None:
        if self._failure:
            raise MoverError(self._failure)
