"""Whether a socket's connections are there, by the events that ZeroMQ tells of it."""

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
        """When the connection was first found missing (at first: when it was asked for); None where it is
        there."""
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
    """Of a listening socket: that one of its connections has ended. Whose, ZeroMQ does not tell: it shows in
    sending."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._watched = socket
        address = f"inproc://lost-connections-{id(self)}"
        socket.monitor(address, zmq.EVENT_DISCONNECTED)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # a full queue would stop the thread that carries the messages
        self._events.connect(address)

    def any_since_last_asked(self) -> bool:
        """To be asked again and again: what is not asked for is kept."""
        found = False
        while self._events.poll(0):
            self._events.recv_multipart()
            found = True
        return found

    def close(self) -> None:
        """Before the socket is closed."""
        self._watched.disable_monitor()
        self._events.close(linger=0)
