"""A peer without the cluster's key gets nothing through a channel, and breaks nothing; a key is changed while
channels are in use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from support.channels import (
    DEADLINE_S,
    HELLO,
    KEY,
    WELCOME,
    assert_still_serves,
    dealer,
    raw_socket,
    router,
    until,
)

from splitserve.transport.channels.channels import DealerChannel, RouterChannel
from splitserve.transport.channels.keys import ClusterKey, new_key
from splitserve.transport.messages.codec import encode


@pytest.mark.parametrize("key", [None, new_key()], ids=["no key", "another key"])
def test_a_stranger_gets_nothing_through(stack: ExitStack, key: ClusterKey | None) -> None:
    server = router(stack)
    stranger = dealer(stack, server.address, key, identity=b"stranger")
    stranger.send(HELLO)
    assert_still_serves(stack, server)
    assert not server.send(b"stranger", WELCOME)
    assert server.counters.dropped_unknown == 1
    assert (server.receive(10), stranger.receive(10), server.counters.bad) == ([], [], 0)


def test_knowing_the_public_key_is_not_enough(stack: ExitStack) -> None:
    server = router(stack)
    thief = raw_socket(stack, server.address, None)
    own = new_key()
    address = server.address
    thief.disconnect(address)
    thief.curve_serverkey, thief.curve_publickey, thief.curve_secretkey = KEY.public, own.public, own.secret
    thief.connect(address)
    thief.send(encode(HELLO))
    assert_still_serves(stack, server)
    assert server.receive(10) == []


@pytest.mark.parametrize("key", [None, new_key()], ids=["no key", "another key"])
def test_a_member_tells_nothing_to_a_server_without_the_key(stack: ExitStack, key: ClusterKey | None) -> None:
    impostor = router(stack, key)
    worker = dealer(stack, impostor.address)
    worker.send(HELLO)
    witness = dealer(stack, impostor.address, key, identity=b"witness")
    witness.send(HELLO)
    assert until(lambda: impostor.receive(10)) == [(b"witness", HELLO)]
    assert not impostor.send(b"p0\0a1", WELCOME)


def test_raw_tcp_noise_breaks_nothing(stack: ExitStack) -> None:
    server = router(stack)
    host, port = server.address.removeprefix("tcp://").split(":")
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        b"\xff" * 1000,
        b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + b"\xff" * 4000,
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(noise)
    assert_still_serves(stack, server)


def all_of(server: RouterChannel) -> list[tuple[bytes, object]]:
    """What has come."""
    arrivals: list[tuple[bytes, object]] = []
    while arrived := server.receive(100):
        arrivals += arrived
    return arrivals


def talk(server: RouterChannel, member: DealerChannel, identity: bytes) -> None:
    """Send both ways, and repeat, as the protocol does: messages under way when a connection ends are lost.
    (Only while it is connected: earlier messages would pile up, and arrive after the key has been
    changed.)"""

    def arrivals() -> object:
        if member.gone_since(time.monotonic()) is None:
            member.send(HELLO)
        return (
            (identity, HELLO) in all_of(server) and server.send(identity, WELCOME) and member.socket.poll(200)
        )

    until(arrivals)
    assert WELCOME in member.receive(100)


def test_the_key_is_changed_while_everybody_goes_on(stack: ExitStack) -> None:
    """Workers with the old key and workers with the new one are connected at the same time; at the end the
    old key opens nothing."""
    old, new = new_key(), new_key()
    server = router(stack, old)
    first = dealer(stack, server.address, old, b"first")
    talk(server, first, b"first")

    server.change_key(replace(old, second=new))  # add
    members = [
        (dealer(stack, server.address, key, name), name)
        for key, name in ((old, b"o1"), (new, b"n1"), (old, b"o2"), (new, b"n2"))
    ]
    for member, name in [(first, b"first"), *members]:
        talk(server, member, name)
    server.change_key(replace(new, second=old))  # switch
    for member, name in [
        (first, b"first"),
        *members,
        (dealer(stack, server.address, replace(new, second=old), b"n3"), b"n3"),
    ]:
        talk(server, member, name)

    server.change_key(new)  # finish
    for member, name in [members[1], members[3]]:
        talk(server, member, name)
    stranger = dealer(stack, server.address, old, b"stranger")
    stranger.send(HELLO)
    assert first.send(HELLO)
    talk(server, dealer(stack, server.address, new, b"last"), b"last")
    assert not server.send(b"stranger", WELCOME)
    assert not server.send(b"first", WELCOME)
    assert [name for name, _ in all_of(server) if name in (b"stranger", b"first", b"o1", b"o2")] == []


SHORT_OF_FILES = """
import resource, sys
from splitserve.transport import channels
from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.channels.keys import ClusterKey
from splitserve.transport.live_environment import ProcessIdentity
from splitserve.transport.messages.messages import FROM_WORKER

channels.HANDSHAKE_TIMEOUT_MS = 60_000  # strangers stay until they go
public, secret, parent = sys.argv[1].encode(), sys.argv[2].encode(), ProcessIdentity.of(int(sys.argv[3]))
with RouterChannel.bind("tcp://127.0.0.1:*", ClusterKey(public, secret), FROM_WORKER) as server:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    print(server.address, flush=True)
    sys.stdin.readline()  # strangers have come
    try:
        open("/dev/null")
        print("there are files left", flush=True)
    except OSError:
        print(parent.alive(), flush=True)
    while not (arrivals := server.receive(10)):
        server.socket.poll(50)
    print(arrivals[0][1].kind, flush=True)
"""


def test_strangers_that_take_all_connections_end_nothing(stack: ExitStack) -> None:
    """A process that has no descriptor left for a moment takes no peer for dead, and receives from members
    once those are gone."""
    argv = [sys.executable, "-c", SHORT_OF_FILES, KEY.public.decode(), KEY.secret.decode(), str(os.getpid())]
    server = stack.enter_context(
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    stack.callback(server.kill)
    assert server.stdin is not None
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    host, _, port = address.removeprefix("tcp://").partition(":")
    strangers = [
        stack.enter_context(socket.create_connection((host, int(port)), DEADLINE_S)) for _ in range(60)
    ]
    until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) >= 40)
    print(file=server.stdin, flush=True)
    assert server.stdout.readline().strip() == "True"
    for stranger in strangers:
        stranger.close()
    member = dealer(stack, address)
    member.send(HELLO)
    assert server.stdout.readline().strip() == HELLO.kind
    assert server.wait(DEADLINE_S) == 0
