"""Control channels: ZeroMQ sockets that carry our messages, encrypted and authenticated with the cluster key
(CURVE).

A ``RouterChannel`` listens and knows each peer by the identity that the peer chose; a ``DealerChannel``
connects to one router and reconnects by itself, for ever. Neither ever blocks:

- ``send`` queues up to HIGH_WATER_MARK messages per peer. Where the queue is full or the peer unknown, the
  message is dropped, counted, and ``send`` returns False. Messages queued when a connection breaks may be
  lost: the protocol repeats them.
- ``receive`` returns messages that have arrived, up to a budget. Anything but a message of an allowed type is
  dropped, counted and logged.

Messages of one call of ``send`` travel as frames of one ZeroMQ message: the peer's thread, and both I/O
threads, wake once for all. They are queued or dropped together. A Prefill with many pixels is a ZeroMQ
message of its own, in frames that other connections' messages come between (``pixel_frames.py``).

A channel belongs to the thread that uses it. Loops wait on it with ``zmq.Poller`` (``channel.socket``), event
loops with ``Attachment``. ``key=None`` means no encryption and no authentication: for an explicit --insecure
only.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Collection
from dataclasses import replace
from typing import cast

import zmq

from ..errors import AddressError
from ..messages.codec import MAX_MESSAGE_BYTES
from ..messages.messages import Hello, Message
from ..messages.pixel_frames import TAG
from .keys import Authenticator, ClusterKey
from .message_socket import ConnectionWatch, Context, LostConnections, MessageSocket


def shared_listener(address: str, backlog: int) -> socket.socket:
    """A TCP listener for a ZeroMQ endpoint that shares its port. Listens on tcp://host:port (host *:
    everywhere; port * or 0: a free one), where others that this function made may listen too. Raises
    OSError."""
    listener = _bound(address, shared=True)
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


def refuse_taken(address: str) -> None:
    """Raises OSError where somebody listens on ``address`` already: a shared listener would go unnoticed
    beside it."""
    _bound(address, shared=False).close()


def _bound(address: str, shared: bool) -> socket.socket:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or port.isdecimal()):
        raise OSError(errno.EINVAL, "expected tcp://host:port")
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, 0 if port == "*" else int(port), type=socket.SOCK_STREAM
        )[0]
    except (socket.gaierror, OverflowError):
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(where)
    except (OSError, OverflowError) as error:
        listener.close()
        raise error if isinstance(error, OSError) else OSError(errno.EINVAL, "no such port") from None
    return listener


HIGH_WATER_MARK = 10_000  # messages per peer and direction
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000  # doubling
CONNECT_TIMEOUT_MS = 1_000
HANDSHAKE_TIMEOUT_MS = 5_000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 2_000
"""The coordinator's own heartbeats are tighter. These detect that a prefill worker is cut off from a decode
worker, and replace a connection that a network has lost: TCP by itself would stand still for about as long
again."""
BACKLOG = 1_024
MOST_JOIN = 10_000
"""Peers that are known to join frames; the earliest are forgotten, and are sent whole messages."""
REJOIN_S = 2.0  # time to connect again after a change of keys that ends all connections


class RouterChannel(MessageSocket):
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
        self._join = dict[bytes, None]()  # peers that join the frames of a Prefill, by their Hello
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @classmethod
    def bind(cls, address: str, key: ClusterKey | None, allowed: Collection[type[Message]]) -> RouterChannel:
        """Listen on ``address``; ``tcp://host:*`` takes a free port, which ``.address`` contains. Raises
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
        """Accept peers with one of the ``key``'s pairs. Without one that was valid before, all connections
        end, and members connect again at once."""
        assert self._key is not None, "a channel without a key has none to change"
        before, self._key = self._key.pairs, key
        self._rejoined_by = float("inf") if key.second else time.monotonic() + REJOIN_S
        if not set(before) <= set(key.pairs):
            self.socket.unbind(self.address)
            before = ()
        for pair in key.pairs:
            if pair not in before:
                _listen(self.socket, self.address, pair)

    def send(self, peer: bytes, *messages: Message) -> bool:
        """Queue ``messages`` for ``peer``. Return False where any had to be dropped."""
        return (self._send_split if peer in self._join else self._send)([peer], messages)

    def reach(self, peer: bytes, *messages: Message) -> bool:
        """``send``; return whether ``peer`` is connected; also while there are two keys (a connection may
        reach the other one's endpoint), and for REJOIN_S after a change that ended all connections."""
        unknown = self.counters.dropped_unknown
        self.send(peer, *messages)
        return self.counters.dropped_unknown == unknown or time.monotonic() < self._rejoined_by

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        """Return the messages of up to ``limit`` calls of ``send``, each with its sender's identity."""
        found = [
            (frames[0], message) for frames in self._receive(limit, 1) for message in self._decoded(frames, 1)
        ]
        for peer, message in found:
            if isinstance(message, Hello) and message.joins_frames:
                self._join[peer] = None
        while len(self._join) > MOST_JOIN:
            del self._join[next(iter(self._join))]
        return found

    def watch_connections(self) -> None:
        """Let ``lost_any`` see connections that end from now on."""
        self._lost = LostConnections(self.socket)

    def lost_any(self) -> bool:
        """Return whether a connection has ended since the last call; call it often. ``reach`` shows whose."""
        return self._lost is not None and self._lost.any_since_last_asked()

    def close(self, linger_s: float = 0.0) -> None:
        if self._lost is not None:
            self._lost.close()
        super().close(linger_s)
        if self._authenticator is not None:
            self._authenticator.join()


class DealerChannel(MessageSocket):
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
        """Connect in the background, now and whenever the connection breaks. Raises AddressError for a
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
        """Return when the connection was first found missing; None while it is there."""
        return self._watch.gone_since(now)

    @property
    def ever_connected(self) -> bool:
        return self._watch.ever_there

    def close(self, linger_s: float = 0.0) -> None:
        self._watch.close()
        super().close(linger_s)

    def send(self, *messages: Message) -> bool:
        """Queue ``messages``. Return False where any had to be dropped."""
        return self._send([], messages)

    def _arrival(self) -> list[bytes]:
        first = self.socket.recv(zmq.NOBLOCK)
        if not self.socket.getsockopt(zmq.RCVMORE):
            return [first]
        if first[:1] != TAG:
            return [first, *self.socket.recv_multipart(zmq.NOBLOCK)]
        pieces = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        return [first, *(cast(bytes, piece.buffer) for piece in pieces)]  # buffers: to join them copies

    def receive(self, limit: int) -> list[Message]:
        """Return the messages of up to ``limit`` calls of ``send``."""
        return [message for frames in self._receive(limit, 0) for message in self._decoded(frames, 0)]


def _listen(socket: zmq.Socket[bytes], address: str, key: ClusterKey) -> None:
    """Add an endpoint for peers that know ``key``. ZeroMQ has one key for an endpoint; several share one
    port, and a peer that reaches the wrong one is refused and connects again. Raises OSError."""
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
    if kind == zmq.DEALER:  # libzmq 4.3.5 aborts a router that sends heartbeats when a connection ends which
        socket.heartbeat_ivl = HEARTBEAT_MS  # its peer has replaced
    socket.heartbeat_timeout = socket.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 30
    return socket
