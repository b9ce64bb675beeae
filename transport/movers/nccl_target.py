"""The ``nccl`` mover, receiving side (see nccl_source.py): a communicator, and a thread, for each writer met. What is decided is decided in
receiving_sessions.py."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter

import torch

from ..handoff.handoff import PeerId
from ..messages.messages import Message
from .block_memory import BlockMemory
from .communicator import Communicator, SharedStore
from .nccl_source import CLOSE_S, PARCEL_BYTES, PARCEL_S
from .receiving_sessions import BeginSession, ComingParcel, HearEntry, Receive, ReceivingSession, ReceivingSessions
from .target_kinds import BookedTarget

_log = logging.getLogger(__name__)


class NcclTarget(BookedTarget):
    """``shape`` is the pool's [num_blocks, num_layers, layer_bytes]. ``dropped`` counts parcels by what was wrong with them."""

    def __init__(self, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        super().__init__(shape[1], shape[2])
        self._memory = memory
        self._sessions = ReceivingSessions(self._book, shape[1], shape[2], PARCEL_BYTES)  # under the lock, too
        self._receivers: dict[ReceivingSession, _Receiver] = {}  # the loop's thread's alone

    @property
    def dropped(self) -> Counter[str]:
        return self._sessions.dropped

    def address(self, peer: PeerId) -> bytes:
        with self._lock:
            self._sessions.meet(peer)
        return self._memory.device.type.encode()

    def shut_out(self, peer: PeerId) -> bool:
        """Nobody but us writes."""
        with self._lock:
            self._sessions.shut_out(peer)
        self._carry_out()
        return True

    def hear(self, peer: PeerId, message: Message) -> None:
        with self._lock:
            self._sessions.hear(peer, message)
        self._carry_out()

    def words(self) -> list[tuple[PeerId, Message]]:
        self._carry_out()
        with self._lock:
            return self._sessions.words()

    def close_all(self) -> None:
        self._close_book()
        with self._lock:
            self._sessions.end_all()
        receivers = list(self._receivers.values())
        self._carry_out()
        for receiver in receivers:
            receiver.join(CLOSE_S)

    def _carry_out(self) -> None:
        with self._lock:
            actions = self._sessions.take()
        for action in actions:
            if isinstance(action, BeginSession):
                self._receivers[action.session] = receiver = _Receiver(self, action.session)
                receiver.start()
            elif isinstance(action, HearEntry):
                self._receivers[action.session].store.heard(action.key, action.value)
            elif isinstance(action, Receive):
                self._receivers[action.session].wake()
            else:
                self._receivers.pop(action.session).tear_down()

    # --- for the receivers' threads --------------------------------------------------------------

    @property
    def lock(self) -> threading.Lock:
        return self._lock

    @property
    def device(self) -> torch.device:
        return self._memory.device

    def say_entry(self, session: ReceivingSession, key: str, value: bytes) -> None:
        with self._lock:
            self._sessions.entry(session, key, value)
            self._news.set()

    def next(self, session: ReceivingSession) -> ComingParcel | None:
        """With the lock held."""
        return self._sessions.next(session)

    def received(self, session: ReceivingSession, packed: torch.Tensor) -> None:
        with self._lock:
            parcel = self._sessions.received(session)
            if parcel is not None and parcel.claim is not None:
                self._memory.unpack(packed, parcel.claim.blocks, parcel.layers)
                self._arrived(self._sessions.written(parcel))

    def broke(self, session: ReceivingSession, reason: str) -> None:
        with self._lock:
            known = not self._sessions.broke(session, reason)
            self._news.set()
        if not known:
            _log.warning("the communicator with %s broke: %s", session.peer[0], reason)


class _Receiver(threading.Thread):
    """Receives what is announced, in order, until something is wrong."""

    def __init__(self, target: NcclTarget, session: ReceivingSession) -> None:
        super().__init__(name="kv-nccl-receiver", daemon=True)
        self._target, self._session = target, session
        self.store = SharedStore(lambda key, value: target.say_entry(session, key, value))
        self._changed = threading.Condition(target.lock)
        self._communicator: Communicator | None = None

    def wake(self) -> None:
        """There is something to be received, or nothing will be any more."""
        with self._changed:
            self._changed.notify_all()

    def tear_down(self) -> None:
        """From the loop's thread."""
        self.wake()
        self.store.give_up()
        if self._communicator is not None:
            with contextlib.suppress(RuntimeError):
                self._communicator.close()

    def run(self) -> None:
        device = self._target.device
        try:
            self._communicator = Communicator(self.store, 1, device, PARCEL_S)
            while (parcel := self._next()) is not None:
                packed = torch.empty(parcel.num_bytes, dtype=torch.uint8, device=device)
                self._communicator.receive(packed, parcel.number, PARCEL_S)
                self._target.received(self._session, packed)
        except Exception as error:  # torch.distributed raises what it likes; whatever it is, the communicator is of no use any more
            self._target.broke(self._session, str(error))
        with contextlib.suppress(RuntimeError):
            if self._communicator is not None:
                self._communicator.close()

    def _next(self) -> ComingParcel | None:
        with self._changed:
            while not self._session.is_over:
                if (parcel := self._target.next(self._session)) is not None:
                    return parcel
                self._changed.wait()
        return None
