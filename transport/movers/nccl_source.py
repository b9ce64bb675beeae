"""The ``nccl`` mover, sending side: packed blocks through a communicator that both workers make at their first meeting.

What a piece of data is (its lease, secret, positions) is said over the encrypted control channel, in the order in which the pieces
leave; the peer receives each into a buffer of its own, and copies it into the pool only where the lease still stands. So no one writes by
himself into anyone's pool. A communicator that breaks ends with this source; the next meeting makes another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MoverError
from ..messages import MAX_PARCEL_POSITIONS, Message, ParcelComing, RendezvousEntry, SessionOver, u32
from .block_memory import BlockMemory
from .communicator import MEET_S, Communicator, SharedStore
from .interface import Arrival, Item, layer_slice

PARCEL_BYTES = 8 << 20
PARCEL_S = 10.0  # a piece that has not left by then, or not come, breaks the communicator
CLOSE_S = 0.2


@dataclass(frozen=True, slots=True)
class _Parcel:
    number: int
    lease: int
    positions: list[int]
    blocks: list[int]
    layers: slice


class NcclSource:
    """One per decode worker. ``shape`` is the pool's; ``num_blocks`` the peer's."""

    def __init__(self, address: bytes, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        """Raises MoverError where the peer's pool lies on another kind of device. The communicator is made in the background."""
        ours, theirs = memory.device.type, address.decode(errors="replace")
        if ours != theirs:
            raise MoverError(f"the mover nccl needs pools of one kind: this worker's lies on {ours}, the decode worker's on {theirs}")
        self._memory, self._shape = memory, shape
        self._session = time.time_ns()  # later ones are greater
        self._changed = threading.Condition()
        self._words: list[Message] = []
        self._waiting: deque[_Parcel] = deque()
        self._leaving: _Parcel | None = None
        self._since = time.monotonic()  # when the thread began with what it does now
        self._left: list[Arrival] = []
        self._num_parcels = 0
        self._failure, self._closed = "", False
        self._store = SharedStore(self._say_entry)
        self._communicator: Communicator | None = None
        self._thread = threading.Thread(target=self._run, name="kv-nccl-sender", daemon=True)
        self._thread.start()

    def put(self, lease: int, secret: bytes, items: Sequence[Item], first_layer: int = 0, num_layers: int | None = None) -> None:
        num_blocks, _, layer_bytes = self._shape
        layers = layer_slice(self._shape, first_layer, num_layers)
        if not all(0 <= block < num_blocks for _, block, _ in items):
            raise MoverError(f"put of a block that does not exist; the pool has {num_blocks}")
        count = layers.stop - layers.start
        size = min(MAX_PARCEL_POSITIONS, max(1, PARCEL_BYTES // (count * layer_bytes)))
        with self._changed:
            self._raise_failure()
            for start in range(0, len(items), size):
                part = items[start : start + size]
                positions = [item[0] for item in part]
                self._waiting.append(_Parcel(self._num_parcels, lease, positions, [item[1] for item in part], layers))
                self._words.append(
                    ParcelComing(
                        session=self._session,
                        number=self._num_parcels,
                        lease=lease,
                        secret=secret,
                        first_layer=layers.start,
                        num_layers=count,
                        positions=u32(positions),
                    )
                )
                self._num_parcels += 1
            self._changed.notify_all()

    def hear(self, message: Message) -> None:
        if isinstance(message, RendezvousEntry) and message.session == self._session:
            self._store.heard(message.key, message.value)
        elif isinstance(message, SessionOver) and message.session == self._session:
            self._fail(f"the decode worker has ended the communicator: {message.reason}")

    def words(self) -> list[Message]:
        with self._changed:
            words, self._words = self._words, []
        return words

    def poll(self) -> list[Arrival]:
        with self._changed:
            busy = self._leaving is not None or self._communicator is None
            if busy and time.monotonic() - self._since > max(MEET_S, PARCEL_S) + 1:
                self._failure = self._failure or "the communicator hangs"
            self._raise_failure()
            left, self._left = self._left, []
        return left

    def pending(self) -> int:
        with self._changed:
            leaving = [self._leaving] if self._leaving is not None else []
            return sum(len(parcel.positions) for parcel in (*self._waiting, *leaving))

    def writing(self, lease: int) -> bool:
        return False  # the peer writes, and only what its leases allow

    def cancel(self, lease: int) -> None:
        """What has been announced leaves, with whatever its blocks then hold: the pieces are counted."""
        with self._changed:
            self._left = [arrival for arrival in self._left if arrival[0] != lease]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._store.give_up()
        if self._communicator is not None:
            self._communicator.close()
        self._thread.join(CLOSE_S)  # one that waits for the peer ends by its own time-out

    def _raise_failure(self) -> None:
        if self._failure:
            raise MoverError(self._failure)

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def _say_entry(self, key: str, value: bytes) -> None:
        with self._changed:
            self._words.append(RendezvousEntry(session=self._session, key=key, value=value))

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            communicator = Communicator(self._store, 0, self._memory.device, PARCEL_S)
            with self._changed:
                self._communicator = communicator
            while (parcel := self._next()) is not None:
                communicator.send(self._memory.pack(parcel.blocks, parcel.layers), parcel.number, PARCEL_S)
                with self._changed:
                    self._left += [(parcel.lease, position) for position in parcel.positions]
                    self._leaving = None
        except Exception as error:  # torch.distributed raises what it likes; whatever it is, the communicator is of no use any more
            self._fail(f"the communicator with the decode worker broke: {error}")
        with contextlib.suppress(RuntimeError):
            if self._communicator is not None:
                self._communicator.close()

    def _next(self) -> _Parcel | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed or self._failure)
            if self._closed or self._failure:
                return None
            self._leaving, self._since = self._waiting.popleft(), time.monotonic()
            return self._leaving
