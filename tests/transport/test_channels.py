"""Channels over real sockets on loopback: members talk, strangers get nothing through and break nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import pytest
import zmq
from support.ports import kept_port

from splitserve.transport import channels
from splitserve.transport.channels import DealerChannel, RouterChannel
from splitserve.transport.codec import encode
from splitserve.transport.errors import AddressError
from splitserve.transport.event_loop import BUDGET, attach
from splitserve.transport.keys import ClusterKey, new_key
from splitserve.transport.messages import FROM_COORDINATOR, FROM_WORKER, Ack, Cancel, RequestFailed, Welcome, u32
from splitserve.transport.wakeup import Wakeup

T = TypeVar("T")
DEADLINE_S = 60.0  # against hanging alone
KEY = new_key()
HELLO = RequestFailed(coordinator=1, dispatch=2, kind="internal", message="x")
WELCOME = Welcome(coordinator=1, heartbeat_s=0.5)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def router(stack: ExitStack, key: ClusterKey | None = KEY, address: str = "tcp://127.0.0.1:*") -> RouterChannel:
    return stack.enter_context(RouterChannel.bind(address, key, FROM_WORKER))


def dealer(stack: ExitStack, address: str, key: ClusterKey | None = KEY, identity: bytes = b"p0\0a1") -> DealerChannel:
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


@pytest.mark.parametrize("key", [KEY, None], ids=["curve", "plain"])
def test_members_talk_both_ways_in_order(stack: ExitStack, key: ClusterKey | None) -> None:
    server = router(stack, key)
    worker = dealer(stack, server.address, key)
    sent = [RequestFailed(coordinator=1, dispatch=i, kind="internal", message="") for i in range(50)]
    assert all(worker.send(message) for message in sent)
    received: list[object] = []
    until(lambda: received.extend(server.receive(7)) or len(received) == 50)
    assert received == [(b"p0\0a1", message) for message in sent]
    assert server.send(b"p0\0a1", WELCOME)
    assert until(lambda: worker.receive(10)) == [WELCOME]


def test_what_is_sent_together_arrives_in_order_however_much_it_is(stack: ExitStack) -> None:
    server = router(stack)
    worker = dealer(stack, server.address)
    sent = [RequestFailed(coordinator=1, dispatch=i, kind="internal", message="") for i in range(channels.MAX_TOGETHER + 5)]
    assert worker.send(*sent)
    received: list[object] = []
    until(lambda: received.extend(server.receive(10)) or len(received) == len(sent))
    assert received == [(b"p0\0a1", message) for message in sent]
    assert server.send(b"p0\0a1", WELCOME, Cancel(coordinator=1, dispatches=u32([7])))
    assert until(lambda: worker.receive(10)) == [WELCOME, Cancel(coordinator=1, dispatches=u32([7]))]
    assert (worker.counters.sent, server.counters.received, server.counters.sent) == (len(sent), len(sent), 2)


def test_one_bad_message_among_several_takes_none_of_the_others_along(stack: ExitStack) -> None:
    server = router(stack)
    peer = raw_socket(stack, server.address)
    peer.send_multipart([encode(HELLO), b"\xff", encode(HELLO)])
    peer.send_multipart([encode(HELLO)] * (channels.MAX_TOGETHER + 1))
    peer.send(encode(HELLO))
    received: list[object] = []
    until(lambda: received.extend(message for _, message in server.receive(10)) or len(received) >= 3)
    assert received == [HELLO] * 3
    assert server.counters.bad == 2


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
    for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000, b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + b"\xff" * 4000):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(noise)
    assert_still_serves(stack, server)


def test_bad_messages_of_a_member_are_dropped_and_counted(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "LOG_EVERY_S", 1e9)
    server = router(stack)
    peer = raw_socket(stack, server.address)
    bad = [b"", b"\xff\xff", encode(WELCOME), encode(Ack(coordinator=1, dispatch=1, lease=1)), encode(HELLO)[:-1]]
    for data in bad:
        peer.send(data)
    peer.send_multipart([b"two", b"frames"])
    peer.send(encode(HELLO))
    assert [message for _, message in until(lambda: server.receive(100))] == [HELLO]
    assert server.counters.bad == len(bad) + 2
    assert server.counters.received == 1
    assert len(caplog.records) == 1, "logging is rate-limited"


def test_a_worker_reconnects_when_the_coordinator_restarts(stack: ExitStack) -> None:
    address = stack.enter_context(kept_port())
    server = RouterChannel.bind(address, KEY, FROM_WORKER)
    worker = dealer(stack, address)
    worker.send(HELLO)
    until(lambda: server.receive(10))
    server.close()
    server = until(lambda: _bind_again(stack, address))
    until(lambda: worker.send(HELLO) and server.receive(10))
    assert server.send(b"p0\0a1", WELCOME)
    assert until(lambda: worker.receive(10)) == [WELCOME]


def _bind_again(stack: ExitStack, address: str) -> RouterChannel | None:
    try:
        return router(stack, address=address)
    except AddressError:  # the old socket's port is freed in the background
        return None


def test_a_restarted_worker_of_the_same_identity_takes_over(stack: ExitStack) -> None:
    server = router(stack)
    old = dealer(stack, server.address)
    old.send(HELLO)
    until(lambda: server.receive(10))
    new = dealer(stack, server.address)
    new.send(HELLO)
    until(lambda: server.receive(10))
    assert server.send(b"p0\0a1", WELCOME)
    assert until(lambda: new.receive(10)) == [WELCOME]


def test_sending_to_a_full_queue_drops_and_counts_and_never_blocks(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HIGH_WATER_MARK", 10)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        worker = dealer(stack, f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        results = [worker.send(HELLO) for _ in range(50)]
    assert results == [True] * 10 + [False] * 40
    assert (worker.counters.sent, worker.counters.dropped_full) == (10, 40)


def test_bad_addresses_are_errors_with_a_sentence(stack: ExitStack) -> None:
    server = router(stack)
    with pytest.raises(AddressError, match=r"cannot listen on .*choose another"):
        router(stack, address=server.address)
    with pytest.raises(AddressError, match=r"cannot connect to nonsense"):
        dealer(stack, "nonsense")


def test_closing_leaves_no_thread_and_no_warning() -> None:
    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            with ExitStack() as stack:
                assert_still_serves(stack, router(stack))
    assert set(threading.enumerate()) <= before


async def test_an_event_loop_hears_every_message(stack: ExitStack) -> None:
    """A flood over several budgets, answered one by one from the callback: no edge is lost."""
    server = router(stack)
    worker = dealer(stack, server.address)
    total, heard, answers = 3 * BUDGET + 5, 0, 0
    done = asyncio.Event()

    def on_worker_messages(messages: list[tuple[bytes, RequestFailed]]) -> None:
        nonlocal heard
        heard += len(messages)
        for identity, message in messages:
            server.send(identity, Cancel(coordinator=1, dispatches=u32([message.dispatch])))

    def on_coordinator_messages(messages: list[Cancel]) -> None:
        nonlocal answers
        answers += len(messages)
        if answers == total:
            done.set()

    loop = asyncio.get_running_loop()
    at_server, at_worker = attach(loop, server, on_worker_messages), attach(loop, worker, on_coordinator_messages)
    for start in range(0, total, 100):
        for dispatch in range(start, min(total, start + 100)):
            worker.send(RequestFailed(coordinator=1, dispatch=dispatch, kind="internal", message=""))
        await asyncio.sleep(0.001)
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    at_server.close(), at_worker.close()
    assert heard == answers == total


async def test_an_event_loop_goes_on_after_an_error_in_the_callback(stack: ExitStack) -> None:
    server = router(stack)
    worker = dealer(stack, server.address)
    loop = asyncio.get_running_loop()
    errors: list[object] = []
    heard = asyncio.Event()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def callback(messages: list[tuple[bytes, RequestFailed]]) -> None:
        if messages[-1][1].kind == "internal":
            raise RuntimeError("first")
        heard.set()

    attachment = attach(loop, server, callback)
    worker.send(HELLO)
    while not errors:
        await asyncio.sleep(0.002)
    worker.send(RequestFailed(coordinator=1, dispatch=2, kind="deadline", message=""))
    await asyncio.wait_for(heard.wait(), DEADLINE_S)
    attachment.close()


def test_a_wakeup_ends_a_poll_from_another_thread() -> None:
    wakeup = Wakeup()
    poller = zmq.Poller()
    poller.register(wakeup.fd, zmq.POLLIN)
    wakeup.clear()
    other = threading.Timer(0.02, wakeup.set)
    other.start()
    assert poller.poll(DEADLINE_S * 1000)
    other.join()
    wakeup.set(), wakeup.clear()
    assert not poller.poll(0)
    wakeup.close()


def all_of(server: RouterChannel) -> list[tuple[bytes, object]]:
    """What has come."""
    heard: list[tuple[bytes, object]] = []
    while arrived := server.receive(100):
        heard += arrived
    return heard


def talk(server: RouterChannel, member: DealerChannel, identity: bytes) -> None:
    """Both ways. Says it again, as the protocol does: what is under way when a connection ends is lost. (Only while it is connected: what
    it says before would pile up, to be heard after the key has been changed.)"""

    def heard() -> object:
        if member.gone_since(time.monotonic()) is None:
            member.send(HELLO)
        return (identity, HELLO) in all_of(server) and server.send(identity, WELCOME) and member.socket.poll(200)

    until(heard)
    assert WELCOME in member.receive(100)


def test_the_key_is_changed_while_everybody_goes_on(stack: ExitStack) -> None:
    """Workers with the old key and workers with the new one are connected at the same time; at the end the old key opens nothing."""
    old, new = new_key(), new_key()
    server = router(stack, old)
    first = dealer(stack, server.address, old, b"first")
    talk(server, first, b"first")

    server.change_key(replace(old, second=new))  # add
    members = [(dealer(stack, server.address, key, name), name) for key, name in ((old, b"o1"), (new, b"n1"), (old, b"o2"), (new, b"n2"))]
    for member, name in [(first, b"first"), *members]:
        talk(server, member, name)
    server.change_key(replace(new, second=old))  # switch
    for member, name in [(first, b"first"), *members, (dealer(stack, server.address, replace(new, second=old), b"n3"), b"n3")]:
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


def test_a_port_that_is_taken_is_not_shared(stack: ExitStack) -> None:
    server = router(stack, KEY)
    for key in (KEY, new_key(), None):
        with pytest.raises(AddressError, match="Address already in use"):
            RouterChannel.bind(server.address, key, FROM_WORKER)


SHORT_OF_FILES = """
import resource, sys
from splitserve.transport import channels
from splitserve.transport.channels import RouterChannel
from splitserve.transport.keys import ClusterKey
from splitserve.transport.liveness import ProcessIdentity
from splitserve.transport.messages import FROM_WORKER

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
    while not (heard := server.receive(10)):
        server.socket.poll(50)
    print(heard[0][1].kind, flush=True)
"""


def test_strangers_that_take_all_connections_end_nothing(stack: ExitStack) -> None:
    """A process that has no file left for a moment believes nobody dead, and hears members once the strangers are gone."""
    argv = [sys.executable, "-c", SHORT_OF_FILES, KEY.public.decode(), KEY.secret.decode(), str(os.getpid())]
    server = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    stack.callback(server.kill)
    assert server.stdin is not None
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    host, _, port = address.removeprefix("tcp://").partition(":")
    strangers = [stack.enter_context(socket.create_connection((host, int(port)), DEADLINE_S)) for _ in range(60)]
    until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) >= 40)
    print(file=server.stdin, flush=True)
    assert server.stdout.readline().strip() == "True"
    for stranger in strangers:
        stranger.close()
    member = dealer(stack, address)
    member.send(HELLO)
    assert server.stdout.readline().strip() == HELLO.kind
    assert server.wait(DEADLINE_S) == 0
