"""Whether a socket's connections are there, by the events of its ZeroMQ monitor."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ConnectionWatch:
    """For a socket that has not been connected yet."""

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
