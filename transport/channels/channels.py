"""Control channels: ZeroMQ sockets that carry our messages, encrypted and authenticated with the cluster key
(CURVE).

A ``RouterChannel`` listens and knows each peer by the identity that the peer chose; a ``DealerChannel``
connects to one router and reconnects by itself, for ever. Neither ever blocks:

- ``send`` queues up to HIGH_WATER_MARK messages per peer. Where the queue is full or the peer unknown, the
  message is dropped, counted, and ``send`` returns False. What was queued when a connection broke may be
  lost: the protocol says things again.
- ``receive`` returns what has arrived, up to a budget. What is no message of an allowed type is dropped,
  counted and logged.

Messages that are sent by one call travel as frames of one ZeroMQ message: the peer's thread, and both I/O
threads, wake once for all. They are queued or dropped together.

A channel belongs to the thread that uses it. Loops wait on it with ``zmq.Poller`` (``channel.socket``), event
loops with ``attach``. ``key=None`` means no encryption and no authentication: for an explicit --insecure
only.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import zmq

from ..errors import AddressError, BadMessage
from ..messages.codec import MAX_MESSAGE_BYTES, decode, encode
from ..messages.messages import Message
from .authenticator import Authenticator
from .connection_watch import ConnectionWatch, LostConnections
from .keys import ClusterKey
from .listening import refuse_taken, shared_listener

HIGH_WATER_MARK = 10_000  # messages per peer and direction
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000  # doubling
CONNECT_TIMEOUT_MS = 1_000
HANDSHAKE_TIMEOUT_MS = 5_000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 2_000
"""The coordinator's own heartbeats are tighter. These tell a prefill worker that it is cut off from a decode
worker, and replace a connection that a network has lost: TCP by itself would stand still for about as long
again."""
BACKLOG = 1_024
REJOIN_S = 2.0  # after a change of keys that ends all connections they come back within so long
MAX_TOGETHER = 256  # messages of one call of ``send``; a receiver refuses more
LOG_EVERY_S = 5.0

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
_log = logging.getLogger(__name__)


@dataclass
class ChannelCounters:
    """Messages since the channel was made."""

    sent: int = 0
    received: int = 0
    dropped_full: int = 0  # the peer's queue was full
    dropped_unknown: int = 0  # no peer of this identity is connected
    dropped_too_large: int = 0
    bad: int = 0  # arrived, but no message of an allowed type


class _Channel:
    """What both kinds share. ``socket`` is for polling only."""

    def __init__(self, context: Context, socket: zmq.Socket[bytes], allowed: Collection[type[Message]]):
        self.socket = socket
        self.counters = ChannelCounters()
        self.after_send: Callable[[], None] | None = None  # set by ``attach``
        self._context = context
        self._allowed = frozenset(allowed)
        self._last_log = -LOG_EVERY_S

    @property
    def fd(self) -> int:
        """Edge-triggered: see ``event_loop.attach``."""
        return int(self.socket.getsockopt(zmq.FD))

    @property
    def readable(self) -> bool:
        """Whether ``receive`` would return (or drop) something now."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _send(self, frames: list[bytes], messages: Sequence[Message]) -> bool:
        if len(messages) > MAX_TOGETHER:
            sent = self._send(frames, messages[:MAX_TOGETHER])
            return self._send(frames, messages[MAX_TOGETHER:]) and sent
        encoded = self._encode(messages)
        if not encoded:
            return False
        try:
            self.socket.send_multipart([*frames, *encoded], zmq.NOBLOCK)
        except zmq.Again:
            self.counters.dropped_full += len(encoded)
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.counters.dropped_unknown += len(encoded)
            return False
        finally:
            if self.after_send is not None:
                self.after_send()
        self.counters.sent += len(encoded)
        return len(encoded) == len(messages)

    def _encode(self, messages: Sequence[Message]) -> list[bytes]:
        encoded = []
        for message in messages:
            try:
                encoded.append(encode(message))
            except BadMessage as error:
                self.counters.dropped_too_large += 1
                _log.error("not sent: %s", error)
        return encoded

    def _receive(self, limit: int, num_before: int) -> list[list[bytes]]:
        """Up to ``limit`` arrivals as frames, of which the first ``num_before`` are no messages."""
        arrivals: list[list[bytes]] = []
        while len(arrivals) < limit and self.readable:  # to ask is cheaper than to be refused
            arrivals.append(self.socket.recv_multipart(zmq.NOBLOCK))
        most = num_before + MAX_TOGETHER
        return [
            frames
            for frames in arrivals
            if num_before < len(frames) <= most or self._reject(frames, "wrong number of frames")
        ]

    def _decode(self, data: bytes, frames: list[bytes]) -> Message | None:
        try:
            message = decode(data, self._allowed)
        except BadMessage as error:
            self._reject(frames, str(error))
            return None
        self.counters.received += 1
        return message

    def _reject(self, frames: list[bytes], reason: str) -> bool:
        self.counters.bad += 1
        now = time.monotonic()
        if now - self._last_log >= LOG_EVERY_S:
            self._last_log = now
            peer = frames[0][:64] if len(frames) > 1 else b"the router"
            _log.warning(
                "dropped a message from %r: %s (%d bad ones so far)", peer, reason, self.counters.bad
            )
        return False

    def close(self, linger_s: float = 0.0) -> None:
        """Ends all connections; what is still queued is lost, but for what leaves within ``linger_s``
        seconds."""
        self.socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RouterChannel(_Channel):
    """The listening end."""

    def __init__(
        self,
        context: Context,
        socket: zmq.Socket[bytes],
        allowed: Collection[type[Message]],
        authenticator: Authenticator | None,
    ):
        super().__init__(context, socket, allowed)
        self._authenticator = authenticator
        self._lost: LostConnections | None = None
        self._rejoined_by = float("-inf")
        self._key: ClusterKey | None = None
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @classmethod
    def bind(cls, address: str, key: ClusterKey | None, allowed: Collection[type[Message]]) -> RouterChannel:
        """Listens on ``address``; ``tcp://host:*`` takes a free port, and ``.address`` tells which. Raises
        AddressError."""
        context: Context = zmq.Context()
        authenticator = Authenticator(context) if key is not None else None
        socket = _configured(context, zmq.ROUTER, address)
        socket.router_handover = True  # a restarted peer of the same identity replaces its old connection
        socket.router_mandatory = True  # an unknown peer is an error that we count
        try:
            if key is None:
                socket.bind(address)
            else:
                refuse_taken(address)
                _listen(socket, address, key)
        except (OSError, zmq.ZMQError) as error:
            socket.close()
            context.term()
            if authenticator is not None:
                authenticator.join()
            raise AddressError(
                f"cannot listen on {address}: {error.strerror}; choose another address or port 0"
            ) from None
        channel = cls(context, socket, allowed, authenticator)
        if key is not None:
            channel._key = replace(key, second=None)
            channel.change_key(key)
        return channel

    def change_key(self, key: ClusterKey) -> None:
        """From now on lets those in who know one of the ``key``'s pairs. Where one that was good before is
        not among them, all connections end, and members connect again at once."""
        assert self._key is not None, "a channel without a key has none to change"
        before, self._key = self._key.pairs, key
        if not set(before) <= set(key.pairs):
            self.socket.unbind(self.address)
            self._rejoined_by = time.monotonic() + REJOIN_S
            before = ()
        for pair in key.pairs:
            if pair not in before:
                _listen(self.socket, self.address, pair)

    def send(self, peer: bytes, *messages: Message) -> bool:
        """Queues ``messages`` for ``peer``; False where any had to be dropped."""
        return self._send([peer], messages)

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        """What has arrived, of up to ``limit`` calls of ``send``: messages, each with its sender's
        identity."""
        return [
            (frames[0], message)
            for frames in self._receive(limit, 1)
            for data in frames[1:]
            if (message := self._decode(data, frames)) is not None
        ]

    def watch_connections(self) -> None:
        """From now on ``lost_any`` tells."""
        self._lost = LostConnections(self.socket)

    def lost_any(self, now: float) -> bool:
        """Whether a peer's connection has ended since the last call, which must come again and again. (Whose:
        ``send`` tells.) What ended because keys were changed does not count."""
        return self._lost is not None and self._lost.any_since_last_asked() and now >= self._rejoined_by

    def close(self, linger_s: float = 0.0) -> None:
        if self._lost is not None:
            self._lost.close()
        super().close(linger_s)
        if self._authenticator is not None:
            self._authenticator.join()


class DealerChannel(_Channel):
    """The connecting end. ``identity`` is how the router knows it."""

    def __init__(
        self,
        context: Context,
        socket: zmq.Socket[bytes],
        allowed: Collection[type[Message]],
        watch: ConnectionWatch,
    ) -> None:
        super().__init__(context, socket, allowed)
        self._watch = watch

    @classmethod
    def connect(
        cls, address: str, identity: bytes, key: ClusterKey | None, allowed: Collection[type[Message]]
    ) -> DealerChannel:
        """Connects in the background, now and whenever the connection breaks. Raises AddressError for a
        malformed address."""
        context: Context = zmq.Context()
        socket = _configured(context, zmq.DEALER, address)
        watch = ConnectionWatch(socket, time.monotonic())
        socket.routing_id = identity
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = RECONNECT_MAX_MS
        socket.connect_timeout = CONNECT_TIMEOUT_MS
        if key is not None:
            socket.curve_serverkey = key.public
            socket.curve_publickey = key.public
            socket.curve_secretkey = key.secret
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            watch.close()
            socket.close()
            context.term()
            raise AddressError(
                f"cannot connect to {address}: {error.strerror}; expected tcp://host:port"
            ) from None
        return cls(context, socket, allowed, watch)

    def gone_since(self, now: float) -> float | None:
        """When the connection was first found missing; None where it is there."""
        return self._watch.gone_since(now)

    @property
    def ever_connected(self) -> bool:
        return self._watch.ever_there

    def close(self, linger_s: float = 0.0) -> None:
        self._watch.close()
        super().close(linger_s)

    def send(self, *messages: Message) -> bool:
        """Queues ``messages``; False where any had to be dropped."""
        return self._send([], messages)

    def receive(self, limit: int) -> list[Message]:
        """What has arrived, of up to ``limit`` calls of ``send``."""
        return [
            message
            for frames in self._receive(limit, 0)
            for data in frames
            if (message := self._decode(data, frames)) is not None
        ]


def _listen(socket: zmq.Socket[bytes], address: str, key: ClusterKey) -> None:
    """Adds an endpoint that lets in who knows ``key``. ZeroMQ has one key for an endpoint; several share one
    port, and who comes to the wrong one is turned away and comes again. Raises OSError."""
    socket.curve_server = True
    socket.curve_secretkey = key.secret
    socket.zap_domain = key.public
    socket.zap_enforce_domain = True
    listener = shared_listener(address, BACKLOG)
    socket.use_fd = listener.fileno()
    socket.bind(address)
    listener.detach()  # it is the endpoint's now


def _configured(context: Context, kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = "[" in address
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.backlog = BACKLOG
    socket.handshake_ivl = HANDSHAKE_TIMEOUT_MS
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = socket.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 30
    return socket
