"""The ``nccl`` mover, sending side: packed blocks through a communicator that both workers make at their first meeting.

What a piece of data is (its lease, secret, positions) is said over the encrypted control channel, in the order in which the pieces
leave; the peer receives each into a buffer of its own, and copies it into the pool only where the lease still stands. So no one writes by
himself into anyone's pool. A communicator that breaks ends with this source; the next meeting makes another. What is decided is decided in
sending_session.py; here are a lock, a thread and the communicator.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence

from ..errors import MoverError
from ..messages.messages import MAX_PARCEL_POSITIONS, Message
from .block_memory import BlockMemory
from .communicator import MEET_S, Communicator, SharedStore
from .interface import Arrival, Item, layer_slice
from .sending_session import LeavingParcel, SendingSession

PARCEL_BYTES = 8 << 20
PARCEL_S = 10.0  # a piece that has not left by then, or not come, breaks the communicator
SLACK_S = 1.0  # the communicator's own limits come first
CLOSE_S = 0.2
_numbers = itertools.count(time.time_ns())  # of sessions: each greater than all before it in this process, whatever the clock does


class NcclSource:
    """One per decode worker. ``shape`` is the pool's; ``num_blocks`` the peer's."""

    def __init__(self, address: bytes, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        """Raises MoverError where the peer's pool lies on another kind of device. The communicator is made in the background."""
        ours, theirs = memory.device.type, address.decode(errors="replace")
        if ours != theirs:
            raise MoverError(f"the mover nccl needs pools of one kind: this worker's lies on {ours}, the decode worker's on {theirs}")
        self._memory, self._shape = memory, shape
        self._changed = threading.Condition()  # and the lock around the session
        self._session = SendingSession(next(_numbers), max(MEET_S, PARCEL_S) + SLACK_S, time.monotonic())
        self._store = SharedStore(self._say_entry)
        self._communicator: Communicator | None = None
        self._thread = threading.Thread(target=self._run, name="kv-nccl-sender", daemon=True)
        self._thread.start()

    @property
    def session(self) -> int:
        """The number of the session that this source is the sending end of."""
        return self._session.number

    def put(self, lease: int, secret: bytes, items: Sequence[Item], first_layer: int = 0, num_layers: int | None = None) -> None:
        num_blocks, _, layer_bytes = self._shape
        layers = layer_slice(self._shape, first_layer, num_layers)
        if not all(0 <= block < num_blocks for _, block, _ in items):
            raise MoverError(f"put of a block that does not exist; the pool has {num_blocks}")
        size = min(MAX_PARCEL_POSITIONS, max(1, PARCEL_BYTES // ((layers.stop - layers.start) * layer_bytes)))
        with self._changed:
            self._session.put(lease, secret, items, layers, size)
            self._changed.notify_all()

    def hear(self, message: Message) -> None:
        with self._changed:
            entry = self._session.hear(message)
            self._changed.notify_all()
        if entry is not None:
            self._store.heard(entry.key, entry.value)

    def words(self) -> list[Message]:
        with self._changed:
            return self._session.words()

    def poll(self) -> list[Arrival]:
        with self._changed:
            return self._session.poll(time.monotonic())

    def pending(self) -> int:
        with self._changed:
            return self._session.num_pending

    def writing(self, lease: int) -> bool:
        return False  # the peer writes, and only what its leases allow

    def cancel(self, lease: int) -> None:
        """What has been announced leaves, with whatever its blocks then hold: the pieces are counted."""
        with self._changed:
            self._session.cancel(lease)

    def close(self) -> tuple[()]:
        with self._changed:
            self._session.close()
            self._changed.notify_all()
        self._store.give_up()
        if self._communicator is not None:
            self._communicator.close()
        self._thread.join(CLOSE_S)  # one that waits for the peer ends by its own time-out
        return ()

    def _say_entry(self, key: str, value: bytes) -> None:
        with self._changed:
            self._session.entry(key, value)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            communicator = Communicator(self._store, 0, self._memory.device, PARCEL_S)
            with self._changed:
                self._communicator = communicator
                self._session.met()
            while (parcel := self._next()) is not None:
                communicator.send(self._memory.pack(parcel.blocks, parcel.layers), parcel.number, PARCEL_S)
                with self._changed:
                    self._session.left()
        except Exception as error:  # torch.distributed raises what it likes; whatever it is, the communicator is of no use any more
            with self._changed:
                self._session.fail(f"the communicator with the decode worker broke: {error}")
        with contextlib.suppress(RuntimeError):
            if self._communicator is not None:
                self._communicator.close()

    def _next(self) -> LeavingParcel | None:
        with self._changed:
            while not self._session.is_over:
                if (parcel := self._session.next(time.monotonic())) is not None:
                    return parcel
                self._changed.wait()
        return None
