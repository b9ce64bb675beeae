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
from .parcel import HIGH_WATER_MARK, ParcelHeader, blocks_per_parcel, join_data_address, unpack_header

HANDSHAKE_TIMEOUT_MS = 5_000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 8_000
BACKLOG = 1_024

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class _Lease:
    secret: bytes
    targets: Mapping[int, int]
    expected: set[int]


class ZmqTarget:
    """Every prefill worker connects here. ``dropped`` counts parcels by what was wrong with them."""

    one_sided = False

    def __init__(self, address: str, pool: Pool):
        """Listens on ``address`` (tcp://host:* takes a free port). Raises AddressError."""
        self._pool = pool
        self._block_bytes = pool.shape[1]
        self._max_blocks = blocks_per_parcel(self._block_bytes)
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
        self._leases[lease] = _Lease(secret, targets, set(targets))

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        if lease in self._leases:
            self._leases[lease].expected.update(positions)

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
        header = unpack_header(data, self._max_blocks)
        if header is None or len(bodies) != 1:
            return "malformed"
        lease = self._leases.get(header.lease)
        if lease is None:
            return "lease"
        if not hmac.compare_digest(header.secret, lease.secret):
            return "secret"
        if len(set(header.positions)) != len(header.positions) or not lease.expected.issuperset(header.positions):
            return "position"
        body = np.frombuffer(bodies[0].buffer, dtype=np.uint8)
        if (header.offset, header.length) != (0, self._block_bytes) or body.size != len(header.positions) * self._block_bytes:
            return "length"
        self._copy(header, lease, body.reshape(-1, self._block_bytes))
        arrivals += [(header.lease, position) for position in header.positions]
        return None

    def _copy(self, header: ParcelHeader, lease: _Lease, blocks: Pool) -> None:
        for position, block in zip(header.positions, blocks, strict=True):
            np.copyto(self._pool[lease.targets[position]], block)
        lease.expected.difference_update(header.positions)
        self.num_blocks_received += len(header.positions)

    def _listening(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PULL)
        socket.ipv6 = "[" in address
        socket.rcvhwm = HIGH_WATER_MARK
        socket.maxmsgsize = self._max_blocks * self._block_bytes + 4096
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
