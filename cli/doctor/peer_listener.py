"""``splitserve doctor --listen``: the end that ``doctor --peer`` of another host talks to. It speaks with
members of the cluster only (CURVE), takes KV blocks as a decode worker does, and keeps nothing."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq

from ... import __version__
from ...transport.channels.keys import Authenticator, ClusterKey
from ...transport.errors import AddressError
from ...transport.messages.fields import WIRE_VERSION
from ...transport.process.host import host_identity
from ..extras import missing_for

if TYPE_CHECKING:
    from ...transport.movers.tcp.target import TcpTarget

NUM_BLOCKS, NUM_LAYERS, LAYER_BYTES = 64, 16, 64 << 10
TOTAL_BYTES = NUM_BLOCKS * NUM_LAYERS * LAYER_BYTES
SECRET_BYTES = 16
MAX_MESSAGE_BYTES = 1 << 16
ARRIVAL_S = 20.0  # for the blocks of one transfer
TURN_S = 0.001
ANY_HOST = "0.0.0.0"
DEFAULT_PORT = 7710  # as that of a decode worker in docs/hosts.md; KV blocks come to the next one


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """``who``: introduce yourself; ``open``: take blocks; ``wait``: answer when they have arrived."""

    kind: str
    lease: int = 0


class Who(msgspec.Struct):
    version: str
    wire: int
    host: str
    now: float  # its wall clock
    movers: tuple[str, ...]
    data_address: str  # of its KV port, with whatever host; "": it cannot take blocks


class Opened(msgspec.Struct):
    lease: int
    secret: bytes


class Came(msgspec.Struct):
    num_blocks: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """HOST, HOST:PORT or tcp://HOST:PORT; an IPv6 address in brackets."""
        text = text.removeprefix("tcp://")
        host, _, number = (
            text.rpartition(":") if ":" in text and not text.endswith("]") else (text, "", str(DEFAULT_PORT))
        )
        return cls(host, int(number))

    def zmq(self, more: int = 0) -> str:
        return f"tcp://{self.host}:{self.port + more}"


class PeerListener:
    """Answers one question at a time. ``run`` returns after ``stop``."""

    def __init__(self, address: Address, key: ClusterKey) -> None:
        """Raises AddressError where it cannot listen."""
        self._movers = movers()  # its imports take a second, for which no peer should have to wait
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context)
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger, self._socket.maxmsgsize = 0, MAX_MESSAGE_BYTES
        self._socket.ipv6 = "[" in address.host
        self._socket.curve_server = True
        self._socket.curve_secretkey = key.secret
        self._socket.zap_domain = key.public
        self._socket.zap_enforce_domain = True
        self._stopped = False
        self._lease, self._data_address = 0, ""
        self._target: TcpTarget | None = None
        try:
            self._socket.bind(address.zmq())
            self._open_target(address)
        except (zmq.ZMQError, AddressError) as error:
            self.close()
            reason = (
                error
                if isinstance(error, AddressError)
                else f"cannot listen on {address.zmq()}: {error.strerror}"
            )
            raise AddressError(
                f"{reason}; is a worker running there? Stop it, or choose another port"
            ) from None

    def _open_target(self, address: Address) -> None:
        if missing_for("worker"):
            return
        from ...transport.movers.tcp.target import TcpTarget

        self._pool = np.zeros((NUM_BLOCKS, NUM_LAYERS, LAYER_BYTES), np.uint8)
        self._target = TcpTarget(address.zmq(1), self._pool, takes_plain=True)
        self._data_address = self._target.data_address(ANY_HOST)

    def run(self) -> None:
        while not self._stopped:
            if self._socket.poll(200):
                self._socket.send(msgspec.msgpack.encode(self._answer(self._socket.recv())))

    def stop(self) -> None:
        """From a signal handler or another thread."""
        self._stopped = True

    def close(self) -> None:
        if self._target is not None:
            self._target.close_all()
        self._socket.close()
        self._context.term()
        self._authenticator.join()

    def _answer(self, data: bytes) -> Who | Opened | Came | None:
        """None: that was no question."""
        try:
            question = msgspec.msgpack.decode(data, type=Question)
        except msgspec.MsgspecError:
            return None
        if question.kind == "who":
            return Who(
                __version__, WIRE_VERSION, host_identity(), time.time(), self._movers, self._data_address
            )
        if self._target is None:
            return None
        if question.kind == "open":
            self._target.close(self._lease)
            self._lease += 1
            secret = secrets.token_bytes(SECRET_BYTES)
            self._target.open(self._lease, secret, {block: block for block in range(NUM_BLOCKS)})
            return Opened(self._lease, secret)
        return self._wait() if question.kind == "wait" and question.lease == self._lease else None

    def _wait(self) -> Came:
        assert self._target is not None
        deadline, come = time.monotonic() + ARRIVAL_S, 0
        while come < NUM_BLOCKS and time.monotonic() < deadline:
            come += sum(lease == self._lease for lease, _ in self._target.poll(NUM_BLOCKS))
            if come < NUM_BLOCKS:
                time.sleep(TURN_S)
        return Came(come, checksum_of(self._pool))


def movers() -> tuple[str, ...]:
    """What a worker of this host would offer by default."""
    if missing_for("worker"):
        return ()
    from ...transport.movers.opening import offered

    return offered("auto", False, False)


def checksum_of(pool: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
    import xxhash

    return str(xxhash.xxh3_128(pool.data).hexdigest())
