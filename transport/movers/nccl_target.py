"""The ``nccl`` mover, receiving side (see nccl_source.py): a communicator, and a thread, for each writer met."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass

import torch

from ..handoff import PeerId
from ..messages import Message, ParcelComing, RendezvousEntry, SessionOver, from_u32
from .block_memory import BlockMemory
from .communicator import Communicator, SharedStore
from .lease_book import Claim
from .nccl_source import CLOSE_S, PARCEL_BYTES, PARCEL_S
from .parcel import ParcelHeader
from .target_kinds import BookedTarget

MAX_WAITING = 1 << 16  # parcels announced and not received: a peer that announces more has its session ended
_log = logging.getLogger(__name__)


class NcclTarget(BookedTarget):
    """``shape`` is the pool's [num_blocks, num_layers, layer_bytes]. ``dropped`` counts parcels by what was wrong with them."""

    def __init__(self, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        super().__init__(shape[1], shape[2])
        self.dropped: Counter[str] = Counter()
        self._memory, self._shape = memory, shape
        self._words: list[tuple[PeerId, Message]] = []  # under the lock, too
        self._met: set[PeerId] = set()
        self._sessions: dict[PeerId, _Session] = {}

    def address(self, peer: PeerId) -> bytes:
        self._met.add(peer)
        return self._memory.device.type.encode()

    def shut_out(self, peer: PeerId) -> bool:
        """Nobody but us writes."""
        self._met.discard(peer)
        if (session := self._sessions.pop(peer, None)) is not None:
            session.end("it has been shut out")
        return True

    def hear(self, peer: PeerId, message: Message) -> None:
        """The first word of a session begins it and ends the one before."""
        if peer not in self._met or not isinstance(message, RendezvousEntry | ParcelComing | SessionOver):
            return
        session = self._sessions.get(peer)
        if session is None or session.number != message.session:
            if isinstance(message, SessionOver) or (session is not None and message.session < session.number):
                return
            if session is not None:
                session.end("a newer one has begun")
            session = self._sessions[peer] = _Session(self, peer, message.session)
        if isinstance(message, RendezvousEntry):
            session.store.heard(message.key, message.value)
        elif isinstance(message, ParcelComing):
            self._announced(session, message)
        else:
            session.end(message.reason)

    def words(self) -> list[tuple[PeerId, Message]]:
        with self._lock:
            words, self._words = self._words, []
        return words

    def close_all(self) -> None:
        self._close_book()
        for session in self._sessions.values():
            session.end("the decode worker ends")
        for session in self._sessions.values():
            session.join(CLOSE_S)

    def _announced(self, session: _Session, message: ParcelComing) -> None:
        _, num_layers, layer_bytes = self._shape
        positions = tuple(from_u32(message.positions))
        num_bytes = len(positions) * message.num_layers * layer_bytes
        fits = 0 < message.num_layers <= num_layers - message.first_layer and 0 < num_bytes <= max(PARCEL_BYTES, num_layers * layer_bytes)
        if not fits:
            session.end("a parcel was announced that cannot be")
            return
        header = ParcelHeader(message.lease, message.secret, message.first_layer * layer_bytes, message.num_layers * layer_bytes, positions)
        with self._lock:
            claim = self._book.claim(header)
        if isinstance(claim, str):
            self.dropped[claim] += 1
        layers = slice(message.first_layer, message.first_layer + message.num_layers)
        session.expect(_Coming(message.number, num_bytes, layers, None if isinstance(claim, str) else claim))

    # --- for the sessions' threads ---------------------------------------------------------------

    def say(self, peer: PeerId, message: Message) -> None:
        with self._lock:
            self._words.append((peer, message))
            self._news.set()

    def received(self, coming: _Coming, packed: torch.Tensor) -> None:
        with self._lock:
            claim = coming.claim
            if claim is None or not claim.valid:
                return
            self._memory.unpack(packed, claim.blocks, coming.layers)
            self._arrived(self._book.complete(claim))

    def give_back(self, coming: _Coming) -> None:
        with self._lock:
            if coming.claim is not None:
                self._book.give_back(coming.claim)


@dataclass(frozen=True, slots=True)
class _Coming:
    """A parcel that has been announced; without a claim it is received and thrown away."""

    number: int
    num_bytes: int
    layers: slice
    claim: Claim | None


class _Session(threading.Thread):
    """Receives what is announced, in order, until something is wrong."""

    def __init__(self, target: NcclTarget, peer: PeerId, number: int) -> None:
        super().__init__(name="kv-nccl-receiver", daemon=True)
        self.number, self._target, self._peer = number, target, peer
        self.store = SharedStore(self._say_entry)
        self._changed = threading.Condition()
        self._coming: deque[_Coming] = deque()
        self._num_announced = 0
        self._over = False
        self._communicator: Communicator | None = None
        self.start()

    def expect(self, coming: _Coming) -> None:
        """A gap in the numbers: an announcement was lost, and with it the order of what comes."""
        with self._changed:
            gap = coming.number != self._num_announced or len(self._coming) >= MAX_WAITING or self._over
            if not gap:
                self._num_announced += 1
                self._coming.append(coming)
                self._changed.notify_all()
        if gap:
            self._target.give_back(coming)
            self.end("announcements were lost")

    def end(self, reason: str) -> None:
        """From any thread; said to the peer once."""
        with self._changed:
            first, self._over = not self._over, True
            coming, self._coming = list(self._coming), deque()
            self._changed.notify_all()
        for one in coming:
            self._target.give_back(one)
        if first:
            self._target.say(self._peer, SessionOver(session=self.number, reason=reason[:4096]))
        self.store.give_up()
        if self._communicator is not None:
            with contextlib.suppress(RuntimeError):
                self._communicator.close()

    def _say_entry(self, key: str, value: bytes) -> None:
        self._target.say(self._peer, RendezvousEntry(session=self.number, key=key, value=value))

    def run(self) -> None:
        device, coming = self._target._memory.device, None
        try:
            self._communicator = Communicator(self.store, 1, device, PARCEL_S)
            while (coming := self._next()) is not None:
                packed = torch.empty(coming.num_bytes, dtype=torch.uint8, device=device)
                self._communicator.receive(packed, coming.number, PARCEL_S)
                self._target.received(coming, packed)
            self.end("it is over")
        except Exception as error:  # torch.distributed raises what it likes; whatever it is, the communicator is of no use any more
            if coming is not None:
                self._target.give_back(coming)
            if not self._over:
                _log.warning("the communicator with %s broke: %s", self._peer[0], error)
            self.end(str(error))

    def _next(self) -> _Coming | None:
        with self._changed:
            self._changed.wait_for(lambda: self._coming or self._over)
            return None if self._over else self._coming.popleft()
