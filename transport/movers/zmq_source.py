"""The ``zmq`` mover, sending side.

ZeroMQ's cost is per frame, and frames of 2 MiB are 2 to 3 times as fast as those of 64 KiB; so blocks leave in parcels. Blocks
that lie side by side leave as they lie, without a copy in user space; others are gathered into one buffer first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import zmq

from ..errors import MoverError
from .allocator import keep_large_buffers
from .interface import Arrival, Item, Pool, layer_slice
from .parcel import HIGH_WATER_MARK, USER_NAME, ParcelHeader, pack_header, slices_per_parcel, split_data_address

RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
CONNECT_TIMEOUT_MS = 3_000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 8_000

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class _Parcel:
    lease: int
    secret: bytes
    positions: tuple[int, ...]
    blocks: list[int]
    layers: slice


class ZmqSource:
    """One per decode worker. What exceeds ZeroMQ's queue waits here, as numbers only."""

    def __init__(self, data_address: str, pool: Pool):
        """Connects in the background. Raises MoverError for a malformed address."""
        self._pool = pool
        self._waiting: deque[_Parcel] = deque()
        self._leaving: deque[tuple[_Parcel, zmq.MessageTracker | None]] = deque()
        keep_large_buffers()
        self._context: Context = zmq.Context()
        self.socket = self._connected(data_address)

    def put(self, lease: int, secret: bytes, items: Sequence[Item], first_layer: int = 0, num_layers: int | None = None) -> None:
        layers = layer_slice(self._pool, first_layer, num_layers)
        if not all(0 <= block < len(self._pool) for _, block, _ in items):
            raise MoverError(f"put of a block that does not exist; the pool has {len(self._pool)}")
        size = slices_per_parcel(self._pool[0, layers].nbytes)
        for start in range(0, len(items), size):
            part = items[start : start + size]
            self._waiting.append(_Parcel(lease, secret, tuple(item[0] for item in part), [item[1] for item in part], layers))
        self._send_waiting()

    def poll(self) -> list[Arrival]:
        self._send_waiting()
        done: list[Arrival] = []
        while self._leaving and ((tracker := self._leaving[0][1]) is None or tracker.done):
            parcel, _ = self._leaving.popleft()
            done += [(parcel.lease, position) for position in parcel.positions]
        return done

    def pending(self) -> int:
        leaving = sum(len(parcel.positions) for parcel, _ in self._leaving)
        return leaving + sum(len(parcel.positions) for parcel in self._waiting)

    def cancel(self, lease: int) -> None:
        self._waiting = deque(parcel for parcel in self._waiting if parcel.lease != lease)
        self._leaving = deque(entry for entry in self._leaving if entry[0].lease != lease)

    def close(self) -> None:
        self._waiting.clear()
        self._leaving.clear()
        self.socket.close(linger=0)
        self._context.term()

    def _send_waiting(self) -> None:
        while self._waiting:
            parcel = self._waiting[0]
            layer_bytes = self._pool.shape[2]
            offset, length = parcel.layers.start * layer_bytes, (parcel.layers.stop - parcel.layers.start) * layer_bytes
            header = ParcelHeader(parcel.lease, parcel.secret, offset, length, parcel.positions)
            try:
                self.socket.send(pack_header(header), zmq.NOBLOCK | zmq.SNDMORE)
            except zmq.Again:
                return
            self._leaving.append((parcel, self._send_body(parcel.blocks, parcel.layers)))
            self._waiting.popleft()

    def _send_body(self, blocks: list[int], layers: slice) -> zmq.MessageTracker | None:
        """None where the blocks may change at once."""
        first, count = blocks[0], len(blocks)
        if blocks == list(range(first, first + count)):
            body = self._pool[first : first + count, layers]
            if body.flags.c_contiguous:
                return self.socket.send(body.data, copy=False, track=True)
        self.socket.send(np.ascontiguousarray(self._pool[blocks, layers]).data, copy=False)
        return None

    def _connected(self, data_address: str) -> zmq.Socket[bytes]:
        address, password = split_data_address(data_address)
        socket = self._context.socket(zmq.PUSH)
        socket.linger = 0
        socket.ipv6 = "[" in address
        socket.sndhwm = HIGH_WATER_MARK
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        socket.connect_timeout = CONNECT_TIMEOUT_MS
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = socket.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
        try:
            socket.plain_username, socket.plain_password = USER_NAME, password.encode()
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            self._context.term()
            raise MoverError(f"cannot connect to {address} for KV blocks: {error.strerror}; expected tcp://host:port") from None
        return socket
