"""TCP listeners for ZeroMQ endpoints that share one port."""

from __future__ import annotations

import errno
import os
import socket


def shared_listener(address: str, backlog: int) -> socket.socket:
    """Listens on tcp://host:port (host *: everywhere; port * or 0: a free one), where others that this
    function made may listen too. Raises OSError."""
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
