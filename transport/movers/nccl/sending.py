"""The sending end of the ``nccl`` mover: the life of a communicator.

    MEETING -- met --> IDLE <-- left -- LEAVING     one parcel at a time, as they were announced
       any -- broke, SessionOver, hung --> FAILED   ``poll`` raises; the next meeting begins another session
       any -- close --> CLOSED                      and SessionOver is sent

Every parcel is announced over the control channel when it is put, and numbered: it leaves even if its lease
is cancelled.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import MoverError
from ...messages.messages import Message, ParcelComing, RendezvousEntry, SessionOver, u32
from ..block_memory import BlockMemory
from ..interface import Arrival, Item, layer_slice
from ..lease_book import cut
from . import communicator as library
from .communicator import CLOSE_S, Communicator, CommunicatorThread, place_of

SLACK_S = 1.0  # the communicator's own limits come first
_numbers = itertools.count(time.time_ns())  # of sessions: greater than all before, also after a restart


@dataclass(frozen=True, slots=True)
class LeavingParcel:
    """These layers of own blocks, for these positions of a lease."""

    number: int
    lease: int
    positions: list[int]
    blocks: list[int]
    layers: slice


class SendingSession:
    """Everything that the sending end decides; a subclass has the communicator. Safe to use from two threads.
    ``number`` grows by session."""

    def __init__(self, number: int, patience_s: float, clock: Callable[[], float]) -> None:
        """``patience_s``: a meeting or a parcel that takes longer has failed."""
        self.number = number
        self._patience_s, self._clock = patience_s, clock
        self._changed = threading.Condition()  # also the lock
        self._since = clock()  # start of the current meeting or parcel
        self._failure = ""
        self._is_met = self._is_closed = False
        self._waiting: deque[LeavingParcel] = deque()
        self._leaving: LeavingParcel | None = None
        self._left: list[Arrival] = []
        self._num_announced = 0
        self._messages: list[Message] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing leaves any more."""
        return self._is_closed or bool(self._failure)

    @property
    def hangs_at(self) -> float | None:
        """Time at which ``poll`` gives up the meeting or parcel under way; None without one."""
        busy = not self.is_over and (self._leaving is not None or not self._is_met)
        return self._since + self._patience_s if busy else None

    def put_parcels(
        self, lease: int, secret: bytes, parcels: Sequence[Sequence[Item]], layers: slice
    ) -> None:
        """Queue and announce parcels. MoverError once the session is over."""
        with self._changed:
            self._raise_failure()
            for part in parcels:
                number, positions = self._num_announced, [item[0] for item in part]
                self._num_announced += 1
                blocks = [item[1] for item in part]
                self._waiting.append(LeavingParcel(number, lease, positions, blocks, layers))
                self._messages.append(
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
            self._changed.notify_all()

    def cancel(self, lease: int) -> None:
        """Report none of this lease's parcels as left. They leave all the same, with the content that their
        blocks then have: the peer counts them."""
        with self._changed:
            self._left = [arrival for arrival in self._left if arrival[0] != lease]

    def pending(self) -> int:
        with self._changed:
            leaving = [self._leaving] if self._leaving is not None else []
            return sum(len(parcel.positions) for parcel in (*self._waiting, *leaving))

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

    def poll(self) -> list[Arrival]:
        """Return blocks that have left since the last call. MoverError once the session has failed."""
        with self._changed:
            if (hangs_at := self.hangs_at) is not None and self._clock() > hangs_at:
                self.fail("the communicator hangs")
            self._raise_failure()
            left, self._left = self._left, []
            return left

    def close_session(self) -> None:
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                over = SessionOver(session=self.number, reason="the sending end has closed it")
                self._messages = [over]
            self._waiting.clear()
            self._changed.notify_all()

    def send_entry(self, key: str, value: bytes) -> None:
        """Queue a rendezvous entry for the other end."""
        with self._changed:
            self._messages.append(RendezvousEntry(session=self.number, key=key, value=value))

    def met(self) -> None:
        """Note that both ends have found each other."""
        with self._changed:
            self._is_met = True

    def next(self) -> LeavingParcel | None:
        """Return the parcel to send now, if any."""
        with self._changed:
            if self.is_over or not self._is_met or self._leaving is not None or not self._waiting:
                return None
            self._leaving, self._since = self._waiting.popleft(), self._clock()
            return self._leaving

    def left(self) -> None:
        """Note that the parcel from ``next`` has left."""
        with self._changed:
            assert self._leaving is not None, "no parcel was being sent"
            self._left += [(self._leaving.lease, position) for position in self._leaving.positions]
            self._leaving = None

    def fail(self, reason: str) -> None:
        """Note that the communicator is broken."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure:
            raise MoverError(self._failure)


class NcclSource(SendingSession):
    """One for each decode worker: a session, and a thread that sends its parcels."""

    def __init__(self, address: bytes, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        """``shape``: of the own pool. Make the communicator in the background. MoverError where the peer's
        pool lies on another kind of device, or on the same GPU."""
        ours, theirs = place_of(memory.device), address.decode(errors="replace")
        if ours.split()[:1] != theirs.split()[:1]:
            raise MoverError(
                f"the mover nccl needs pools of one kind; here it is {ours}, at the peer {theirs}"
            )
        if memory.device.type == "cuda" and ours == theirs:
            raise MoverError("NCCL connects no two processes on one GPU: use cuda_ipc there")
        super().__init__(next(_numbers), max(library.MEET_S, library.PARCEL_S) + SLACK_S, time.monotonic)
        self._memory, self._shape = memory, shape
        self._thread = CommunicatorThread(0, memory.device, self.send_entry, self._carry_next, self._broke)
        self._thread.start()

    def put(
        self,
        lease: int,
        secret: bytes,
        items: Sequence[Item],
        first_layer: int = 0,
        num_layers: int | None = None,
    ) -> None:
        layers = layer_slice(self._shape, first_layer, num_layers)
        self.put_parcels(lease, secret, cut(items, layers, self._shape), layers)

    def receive(self, message: Message) -> None:
        if (entry := self.entry_in(message)) is not None:
            self._thread.receive(entry.key, entry.value)

    def writing(self, lease: int) -> bool:
        return False  # the peer writes, and only what its leases allow

    def close(self) -> tuple[()]:
        self.close_session()
        self._thread.tear_down()
        self._thread.join(CLOSE_S)  # one that waits for the peer ends by its own time-out
        return ()

    def _carry_next(self, communicator: Communicator) -> bool:
        self.met()
        with self._changed:
            while (parcel := self.next()) is None:
                if self.is_over:
                    return False
                self._changed.wait()
        communicator.send(self._memory.pack(parcel.blocks, parcel.layers), parcel.number)
        self.left()
        return True

    def _broke(self, reason: str) -> None:
        self.fail(f"the communicator with the decode worker broke: {reason}")
