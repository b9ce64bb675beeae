"""Authentication of connecting peers: a ZAP handler (rfc.zeromq.org/spec/27) in a daemon thread, one per
ZeroMQ context.

A listening endpoint's *ZAP domain* names the one credential it accepts: the cluster's public key (z85). The
domain never travels, so the handler needs no list and serves any number of endpoints. It ends when its
context is terminated.
"""

from __future__ import annotations

import hmac
import threading

import zmq
from zmq.utils import z85

_ENDPOINT = "inproc://zeromq.zap.01"
_NUM_REQUEST_FRAMES = 6  # version, request id, domain, address, identity, mechanism; then the credentials


class Authenticator:
    """Answers the authentication requests of all server sockets of ``context``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]):
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        # before any server socket: without a handler every peer would be accepted
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="zmq-authenticator", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread, which ends with its context."""
        self._thread.join()

    def _serve(self) -> None:
        with self._socket:
            while True:
                try:
                    request = self._socket.recv_multipart()
                    self._socket.send_multipart(_answer(request))
                except zmq.ContextTerminated:
                    return


def _answer(request: list[bytes]) -> list[bytes]:
    version, request_id, domain = request[:3]
    if _is_member(domain, request[_NUM_REQUEST_FRAMES - 1], request[_NUM_REQUEST_FRAMES:]):
        return [version, request_id, b"200", b"OK", b"member", b""]
    return [version, request_id, b"400", b"not a member of this cluster", b"", b""]


def _is_member(domain: bytes, mechanism: bytes, credentials: list[bytes]) -> bool:
    if mechanism == b"CURVE" and len(credentials) == 1:  # the client's public key, proved by the handshake
        return hmac.compare_digest(z85.encode(credentials[0]), domain)
    return False
