"""A ZeroMQ socket that carries our messages: encoding, decoding, and counts of dropped messages."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import BadMessage
from ..messages.codec import decode, encode
from ..messages.messages import Message, OtherVersion
from ..messages.pixel_frames import MAX_FRAMES, TAG, Frame, has_large_pixels, joined, split

MAX_TOGETHER = 256  # messages of one call of ``send``; a receiver refuses more
LOG_EVERY_S = 5.0

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
_log = logging.getLogger(__name__)
T = TypeVar("T")
D = TypeVar("D")


@dataclass
class ChannelCounters:
    """Counts of messages since the channel was made."""

    sent: int = 0
    received: int = 0
    dropped_full: int = 0  # the peer's queue was full
    dropped_unknown: int = 0  # no peer of this identity is connected
    dropped_too_large: int = 0
    bad: int = 0  # arrived, but no message of an allowed type


class MessageSocket:
    """Sends and receives messages of the ``allowed`` types, without blocking. ``socket`` is for polling
    only."""

    def __init__(self, context: Context, socket: zmq.Socket[bytes], allowed: Collection[type[Message]]):
        self.socket = socket
        self.counters = ChannelCounters()
        self.after_send: Callable[[], None] | None = None  # set by ``Attachment``
        self._context = context
        self._allowed = frozenset(allowed)
        self._last_log = -LOG_EVERY_S

    @property
    def fd(self) -> int:
        """Edge-triggered: see ``event_loop.Attachment``."""
        return int(self.socket.getsockopt(zmq.FD))

    @property
    def readable(self) -> bool:
        """Whether ``receive`` would return (or drop) anything now."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _send(self, frames: list[bytes], messages: Sequence[Message]) -> bool:
        if len(messages) > MAX_TOGETHER:
            sent = self._send(frames, messages[:MAX_TOGETHER])
            return self._send(frames, messages[MAX_TOGETHER:]) and sent
        encoded = [data for message in messages if (data := self._encoded(encode, message)) is not None]
        return self._put(frames, encoded, len(encoded)) and len(encoded) == len(messages)

    def _send_split(self, frames: list[bytes], messages: Sequence[Message]) -> bool:
        """``_send``, with pixels in frames of their own: each such Prefill is a ZeroMQ message of its own."""
        large = next((i for i, message in enumerate(messages) if has_large_pixels(message)), None)
        if large is None:
            return self._send(frames, messages)
        before = not large or self._send(frames, messages[:large])
        encoded = self._encoded(split, messages[large])
        sent = encoded is not None and self._put(frames, encoded, 1)
        rest = messages[large + 1 :]
        return (not rest or self._send_split(frames, rest)) and before and sent

    def _put(self, frames: list[bytes], encoded: Sequence[Frame], count: int) -> bool:
        """``count``: messages in ``encoded``."""
        if not encoded:
            return False
        try:
            self.socket.send_multipart([*frames, *encoded], zmq.NOBLOCK, copy=count == len(encoded))
        except zmq.Again:
            self.counters.dropped_full += count
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.counters.dropped_unknown += count
            return False
        finally:
            if self.after_send is not None:
                self.after_send()
        self.counters.sent += count
        return True

    def _encoded(self, encoder: Callable[[Message], T], message: Message) -> T | None:
        try:
            return encoder(message)
        except BadMessage as error:
            self.counters.dropped_too_large += 1
            _log.error("not sent: %s", error)
            return None

    def _receive(self, limit: int, num_before: int) -> list[list[bytes]]:
        """Return up to ``limit`` arrivals as frames; the first ``num_before`` of each are no messages."""
        arrivals: list[list[bytes]] = []
        while len(arrivals) < limit and self.readable:  # a check is cheaper than a refused call
            arrivals.append(self._arrival())
        return [
            frames
            for frames in arrivals
            if num_before < len(frames) <= num_before + _most_frames(frames[num_before])
            or self._reject(frames, "wrong number of frames")
        ]

    def _arrival(self) -> list[bytes]:
        """Return the frames of the next ZeroMQ message."""
        return self.socket.recv_multipart(zmq.NOBLOCK)

    def _decoded(self, frames: list[bytes], num_before: int) -> Iterator[Message]:
        """Yield the messages of one ZeroMQ message."""
        own = frames[num_before:]
        if own[0][:1] == TAG:
            if (message := self._checked(frames, joined, own)) is not None:
                yield message
            return
        for data in own:
            if (message := self._checked(frames, decode, data)) is not None:
                yield message

    def _checked(
        self, frames: list[bytes], decoder: Callable[[D, Collection[type[Message]]], Message], data: D
    ) -> Message | None:
        try:
            message = decoder(data, self._allowed)
        except BadMessage as error:
            self._reject(frames, str(error))
            return None
        self.counters.received += 1
        if isinstance(message, OtherVersion):
            self._warn(frames, "%s", message.sentence)
        return message

    def _reject(self, frames: list[bytes], reason: str) -> bool:
        self.counters.bad += 1
        self._warn(frames, "dropped a message: %s (%d bad ones so far)", reason, self.counters.bad)
        return False

    def _warn(self, frames: list[bytes], sentence: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._last_log >= LOG_EVERY_S:
            self._last_log = now
            peer = frames[0].partition(b"\0")[0] if len(frames) > 1 else b"the router"  # its name
            _log.warning(f"%r: {sentence}", peer[:64].decode(errors="replace"), *values)

    def close(self, linger_s: float = 0.0) -> None:
        """End all connections; queued messages that do not leave within ``linger_s`` seconds are lost."""
        self.socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _most_frames(first: bytes) -> int:
    """Return how many frames a ZeroMQ message may have that begins with this one."""
    return MAX_FRAMES if first[:1] == TAG else MAX_TOGETHER


_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ConnectionWatch:
    """Whether a socket's connections are there, by the events of its ZeroMQ monitor. Made before the socket
    is connected."""

    def __init__(self, socket: zmq.Socket[bytes], now: float) -> None:
        self._watched = socket
        self._events = socket.get_monitor_socket(_EVENTS)
        self._gone_since: float | None = now
        self.ever_there = False

    def gone_since(self, now: float) -> float | None:
        """Return when the connection was first found missing (initially: when it was asked for); None while
        it is there."""
        while self._events.poll(0):
            there = recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.ever_there = self.ever_there or there
            self._gone_since = None if there else now
        return self._gone_since

    def close(self) -> None:
        """Before the socket is closed."""
        self._watched.disable_monitor()
        self._events.close()


class LostConnections:
    """Watches a listening socket for connections that end. ZeroMQ does not name the peer: sending to it
    fails."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._watched = socket
        address = f"inproc://lost-connections-{id(self)}"
        socket.monitor(address, zmq.EVENT_DISCONNECTED)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # a full queue would stop the thread that carries the messages
        self._events.connect(address)

    def any_since_last_asked(self) -> bool:
        """Return whether a connection has ended since the last call. Call it regularly: events are queued
        until then."""
        found = False
        while self._events.poll(0):
            self._events.recv_multipart()
            found = True
        return found

    def close(self) -> None:
        """Before the socket is closed."""
        self._watched.disable_monitor()
        self._events.close(linger=0)
