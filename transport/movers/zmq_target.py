"""The ``zmq`` mover, receiving side.

The data socket is not encrypted. It accepts only who knows the password in ``data_address``, and each parcel carries the
secret of its grant; both came over the encrypted control channel. A parcel that names an unknown lease, a wrong secret, a
position not expected or a wrong length is dropped and counted before any byte of it reaches the pool.
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import zmq

from ..authenticator import Authenticator
from ..errors import AddressError
from ..host import advertised_address
from .allocator import keep_large_buffers
from .interface import Arrival, Pool
from .parcel import HIGH_WATER_MARK, PARCEL_BYTES, ParcelHeader, join_data_address, slices_per_parcel, unpack_header

HANDSHAKE_TIMEOUT_MS = 5_000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 8_000
BACKLOG = 1_024

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class _Lease:
    secret: bytes
    targets: Mapping[int, int]
    missing: dict[int, int]  # by position, a bit for each layer that has not arrived; none missing: no entry


class ZmqTarget:
    """Every prefill worker connects here. ``dropped`` counts parcels by what was wrong with them."""

    one_sided = False

    def __init__(self, address: str, pool: Pool):
        """Listens on ``address`` (tcp://host:* takes a free port). Raises AddressError."""
        self._pool = pool
        _, self._num_layers, self._layer_bytes = pool.shape
        self._all_layers = (1 << self._num_layers) - 1
        self._leases: dict[int, _Lease] = {}
        self.num_blocks_received = 0
        self.dropped: Counter[str] = Counter()
        self._password = secrets.token_hex(16)
        keep_large_buffers()
        self._context: Context = zmq.Context()
        self._authenticator = Authenticator(self._context)
        self.socket = self._listening(address)

    def data_address(self, host: str) -> str:
        """What a peer that reaches us as ``host`` needs to connect. Confidential."""
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return join_data_address(advertised_address(bound, host), self._password)

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        self._leases[lease] = _Lease(secret, targets, dict.fromkeys(targets, self._all_layers))

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        if lease in self._leases:
            self._leases[lease].missing.update(dict.fromkeys(positions, self._all_layers))

    def close(self, lease: int) -> None:
        self._leases.pop(lease, None)

    def poll(self, limit: int) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for _ in range(limit):
            try:
                header = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            bodies = self._rest()
            reason = self._take_in(header, bodies, arrivals)
            if reason is not None:
                self.dropped[reason] += 1
        return arrivals

    def close_all(self) -> None:
        self._leases.clear()
        self.socket.close(linger=0)
        self._context.term()
        self._authenticator.join()

    def _rest(self) -> list[zmq.Frame]:
        frames = []
        while self.socket.getsockopt(zmq.RCVMORE):
            frames.append(self.socket.recv(copy=False))
        return frames

    def _take_in(self, data: bytes, bodies: list[zmq.Frame], arrivals: list[Arrival]) -> str | None:
        """Copies a parcel into the pool and names it in ``arrivals``, or says what is wrong with it."""
        header = unpack_header(data, slices_per_parcel(self._layer_bytes))
        if header is None or len(bodies) != 1:
            return "malformed"
        lease = self._leases.get(header.lease)
        if lease is None:
            return "lease"
        if not hmac.compare_digest(header.secret, lease.secret):
            return "secret"
        layers = self._layers(header)
        body = np.frombuffer(bodies[0].buffer, dtype=np.uint8)
        if layers is None or body.size != len(header.positions) * header.length:
            return "length"
        bits = (1 << layers.stop) - (1 << layers.start)
        if len(set(header.positions)) != len(header.positions) or any(bits & ~lease.missing.get(p, 0) for p in header.positions):
            return "position"
        self._copy(header, lease, layers, body.reshape(len(header.positions), -1, self._layer_bytes))
        arrivals += [(header.lease, position) for position in header.positions if self._is_complete(lease, position, bits)]
        return None

    def _layers(self, header: ParcelHeader) -> slice | None:
        first, rest = divmod(header.offset, self._layer_bytes)
        count, more = divmod(header.length, self._layer_bytes)
        return slice(first, first + count) if rest == more == 0 and 0 < count <= self._num_layers - first else None

    def _copy(self, header: ParcelHeader, lease: _Lease, layers: slice, slices: Pool) -> None:
        for position, content in zip(header.positions, slices, strict=True):
            np.copyto(self._pool[lease.targets[position], layers], content)

    def _is_complete(self, lease: _Lease, position: int, arrived: int) -> bool:
        lease.missing[position] &= ~arrived
        if lease.missing[position]:
            return False
        del lease.missing[position]
        self.num_blocks_received += 1
        return True

    def _listening(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PULL)
        socket.ipv6 = "[" in address
        socket.rcvhwm = HIGH_WATER_MARK
        socket.maxmsgsize = max(PARCEL_BYTES, self._num_layers * self._layer_bytes) + 4096
        socket.backlog = BACKLOG
        socket.handshake_ivl = HANDSHAKE_TIMEOUT_MS
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = socket.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
        socket.plain_server = True
        socket.zap_domain = self._password.encode()
        socket.zap_enforce_domain = True
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            self._context.term()
            self._authenticator.join()
            reason = f"cannot listen on {address} for KV blocks: {error.strerror}; choose another address or port *"
            raise AddressError(reason) from None
        return socket
