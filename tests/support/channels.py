"""Channels over real sockets on loopback, which are closed with the test's ``stack``."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import zmq

from splitserve.transport.channels.channels import DealerChannel, RouterChannel
from splitserve.transport.channels.keys import ClusterKey, new_key
from splitserve.transport.messages.messages import FROM_COORDINATOR, FROM_WORKER, RequestFailed, Welcome

T = TypeVar("T")
DEADLINE_S = 60.0  # against hanging alone
KEY = new_key()
HELLO = RequestFailed(coordinator=1, dispatch=2, kind="internal", message="x")
WELCOME = Welcome(coordinator=1, heartbeat_s=0.5)


def router(
    stack: ExitStack, key: ClusterKey | None = KEY, address: str = "tcp://127.0.0.1:*"
) -> RouterChannel:
    return stack.enter_context(RouterChannel.bind(address, key, FROM_WORKER))


def dealer(
    stack: ExitStack, address: str, key: ClusterKey | None = KEY, identity: bytes = b"p0\0a1"
) -> DealerChannel:
    return stack.enter_context(DealerChannel.connect(address, identity, key, FROM_COORDINATOR))


def raw_socket(stack: ExitStack, address: str, key: ClusterKey | None = KEY) -> zmq.Socket[bytes]:
    """A member of the cluster that sends whatever it likes."""
    context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
    peer = stack.enter_context(context.socket(zmq.DEALER))
    peer.linger = 0
    if key is not None:
        peer.curve_serverkey = peer.curve_publickey = key.public
        peer.curve_secretkey = key.secret
    peer.connect(address)
    return peer


def until(attempt: Callable[[], T]) -> T:
    """The first truthy result of ``attempt``."""
    deadline = time.monotonic() + DEADLINE_S
    while not (result := attempt()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.002)
    return result


def assert_still_serves(stack: ExitStack, server: RouterChannel) -> None:
    member = dealer(stack, server.address, identity=b"member")
    member.send(HELLO)
    assert until(lambda: server.receive(10)) == [(b"member", HELLO)]
    assert server.send(b"member", WELCOME)
    assert until(lambda: member.receive(10)) == [WELCOME]
