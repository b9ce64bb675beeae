"""The ``nccl`` mover: packed blocks by torch.distributed send and receive; NCCL between GPUs, Gloo between
host pools.

Two workers make a communicator of two ranks at their first meeting (communicator.py). Each parcel is
announced over the control channel (lease, secret, positions) in the order in which parcels leave. The
receiver takes each into a buffer of its own and copies it into the pool only while its lease stands, so no
peer writes the pool by itself. A communicator that breaks ends with its source; the next meeting makes
another. nccl_sender.py and nccl_receiver.py decide; this file has the locks, the threads and the
communicators."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ..errors import MoverError
from ..messages.messages import Message, PeerId
from . import communicator as library
from .block_memory import BlockMemory
from .communicator import Communicator, SharedStore
from .interface import Arrival, Item, layer_slice
from .lease_book import PARCEL_BYTES, BookedTarget, cut
from .nccl_receiver import BeginSession, EndSession, PassEntry, ReceivingSession, ReceivingSessions
from .nccl_sender import SendingSession

SLACK_S = 1.0  # the communicator's own limits come first
CLOSE_S = 0.2
_numbers = itertools.count(time.time_ns())  # of sessions: greater than all before it, whatever the clock does
_log = logging.getLogger(__name__)


class _End(threading.Thread):
    """One end of a session: makes the communicator, then calls ``carry_next`` until it returns False."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        send_entry: Callable[[str, bytes], None],
        carry_next: Callable[[Communicator], bool],
        failed: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"kv-nccl-{rank}", daemon=True)
        self._rank, self._device, self._carry_next, self._failed = rank, device, carry_next, failed
        self.store = SharedStore(send_entry)
        self.communicator: Communicator | None = None

    def run(self) -> None:
        try:
            self.communicator = Communicator(self.store, self._rank, self._device)
            while self._carry_next(self.communicator):
                pass
        except Exception as error:  # torch.distributed raises anything
            self._failed(str(error))
        self.tear_down()

    def tear_down(self) -> None:
        """From any thread: nothing is carried any more."""
        self.store.give_up()
        if self.communicator is not None:
            self.communicator.close()


class NcclSource:
    """The sending side: one per decode worker."""

    def __init__(self, address: bytes, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        """``shape``: of the own pool. Make the communicator in the background. MoverError where the peer's
        pool lies on another kind of device."""
        ours, theirs = memory.device.type, address.decode(errors="replace")
        if ours != theirs:
            raise MoverError(
                f"the mover nccl needs pools of one kind; here it is {ours}, at the peer {theirs}"
            )
        self._memory, self._shape = memory, shape
        self._changed = threading.Condition()  # also the lock around the session
        self._session = SendingSession(
            next(_numbers), max(library.MEET_S, library.PARCEL_S) + SLACK_S, time.monotonic()
        )
        self._end = _End(0, memory.device, self._send_entry, self._carry_next, self._broke)
        self._end.start()

    @property
    def session(self) -> int:
        """Number of this source's session."""
        return self._session.number

    def put(
        self,
        lease: int,
        secret: bytes,
        items: Sequence[Item],
        first_layer: int = 0,
        num_layers: int | None = None,
    ) -> None:
        layers = layer_slice(self._shape, first_layer, num_layers)
        parts = cut(items, layers, self._shape)
        with self._changed:
            self._session.put(lease, secret, parts, layers)
            self._changed.notify_all()

    def receive(self, message: Message) -> None:
        with self._changed:
            entry = self._session.receive(message)
            self._changed.notify_all()
        if entry is not None:
            self._end.store.receive(entry.key, entry.value)

    def take_messages(self) -> list[Message]:
        with self._changed:
            return self._session.take_messages()

    def poll(self) -> list[Arrival]:
        with self._changed:
            return self._session.poll(time.monotonic())

    def pending(self) -> int:
        with self._changed:
            return self._session.num_pending

    def writing(self, lease: int) -> bool:
        return False  # the peer writes, and only what its leases allow

    def cancel(self, lease: int) -> None:
        """Announced parcels leave all the same, whatever their blocks then hold: the peer counts them."""
        with self._changed:
            self._session.cancel(lease)

    def close(self) -> tuple[()]:
        with self._changed:
            self._session.close()
            self._changed.notify_all()
        self._end.tear_down()
        self._end.join(CLOSE_S)  # one that waits for the peer ends by its own time-out
        return ()

    def _send_entry(self, key: str, value: bytes) -> None:
        with self._changed:
            self._session.entry(key, value)

    def _carry_next(self, communicator: Communicator) -> bool:
        with self._changed:
            self._session.met()
            while (parcel := self._session.next(time.monotonic())) is None:
                if self._session.is_over:
                    return False
                self._changed.wait()
        communicator.send(self._memory.pack(parcel.blocks, parcel.layers), parcel.number)
        with self._changed:
            self._session.left()
        return True

    def _broke(self, reason: str) -> None:
        with self._changed:
            self._session.fail(f"the communicator with the decode worker broke: {reason}")


class NcclTarget(BookedTarget):
    """The receiving side: a communicator and a thread for each writer. ``shape`` is the pool's."""

    def __init__(self, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        super().__init__(shape[1], shape[2])
        self._memory = memory
        self._changed = threading.Condition(self._lock)
        self._sessions = ReceivingSessions(
            self._book, shape[1], shape[2], PARCEL_BYTES
        )  # under the lock, too
        self._ends: dict[ReceivingSession, _End] = {}  # of the worker's thread alone

    @property
    def dropped(self) -> Counter[str]:
        """Parcels dropped, by reason."""
        return self._sessions.dropped

    def address(self, peer: PeerId) -> bytes:
        with self._lock:
            self._sessions.meet(peer)
        return self._memory.device.type.encode()

    def shut_out(self, peer: PeerId) -> bool:
        """True at once: only this process writes."""
        with self._lock:
            self._sessions.shut_out(peer)
        self._carry_out()
        return True

    def receive(self, peer: PeerId, message: Message) -> None:
        with self._lock:
            self._sessions.receive(peer, message)
        self._carry_out()

    def take_messages(self) -> list[tuple[PeerId, Message]]:
        self._carry_out()
        with self._lock:
            return self._sessions.take_messages()

    def close_all(self) -> None:
        self._close_book()
        with self._lock:
            self._sessions.end_all()
        ends = list(self._ends.values())
        self._carry_out()
        for end in ends:
            end.join(CLOSE_S)

    def _carry_out(self) -> None:
        with self._lock:
            actions = self._sessions.take()
            self._changed.notify_all()
        for action in actions:
            if isinstance(action, BeginSession):
                self._begin(action.session)
            elif isinstance(action, PassEntry):
                self._ends[action.session].store.receive(action.key, action.value)
            elif isinstance(action, EndSession):
                self._ends.pop(action.session).tear_down()

    def _begin(self, session: ReceivingSession) -> None:
        def send_entry(key: str, value: bytes) -> None:
            with self._lock:
                self._sessions.entry(session, key, value)
                self._news.set()

        def failed(reason: str) -> None:
            with self._lock:
                is_news = self._sessions.broke(session, reason)
                self._news.set()
            if is_news:
                _log.warning("the communicator with %s broke: %s", session.peer[0], reason)

        def carry_next(communicator: Communicator) -> bool:
            return self._receive_next(session, communicator)

        self._ends[session] = end = _End(1, self._memory.device, send_entry, carry_next, failed)
        end.start()

    def _receive_next(self, session: ReceivingSession, communicator: Communicator) -> bool:
        with self._changed:
            while (coming := self._sessions.next(session)) is None:
                if session.is_over:
                    return False
                self._changed.wait()
        packed = torch.empty(coming.num_bytes, dtype=torch.uint8, device=self._memory.device)
        communicator.receive(packed, coming.number)
        with self._lock:
            parcel = self._sessions.received(session)
            if parcel is not None and parcel.claim is not None:
                self._memory.unpack(packed, parcel.claim.blocks, parcel.layers)
                self._arrived(self._sessions.written(parcel))
        return True
