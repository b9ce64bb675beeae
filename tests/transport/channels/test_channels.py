"""Channels over real sockets on loopback: members talk, and what is bad, too much or without an addressee
breaks nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack

import pytest
from support.channels import HELLO, KEY, WELCOME, assert_still_serves, dealer, raw_socket, router, until
from support.ports import kept_port

from splitserve.transport.channels import channels, message_socket
from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.channels.keys import ClusterKey, new_key
from splitserve.transport.errors import AddressError
from splitserve.transport.messages.codec import encode
from splitserve.transport.messages.messages import FROM_WORKER, Ack, Cancel, RequestFailed, u32


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


REPLACED = """
import time
from splitserve.transport.channels.channels import HEARTBEAT_MS, DealerChannel, RouterChannel
from splitserve.transport.messages.messages import FROM_COORDINATOR, FROM_WORKER, Goodbye

message = Goodbye(worker_id="p", incarnation=1)
with RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER) as router:
    def connected():
        dealer = DealerChannel.connect(router.address, b"p", None, FROM_COORDINATOR)
        dealer.send(message)
        while not router.receive(1):
            time.sleep(0.01)
        return dealer
    old, new = connected(), connected()
    old.send(message)
    old.close(linger_s=1.0)
    end = time.monotonic() + 5 * HEARTBEAT_MS / 1000
    while time.monotonic() < end:
        new.send(message)
        router.receive(1)
        time.sleep(0.01)
    new.close()
"""


def test_a_replaced_connection_that_ends_with_a_message_unread_aborts_no_process() -> None:
    """libzmq's assertion ended a coordinator whose host had stood still for seconds."""
    ran = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_each_takes_a_free_port_of_its_own(stack: ExitStack) -> None:
    first, second = router(stack), router(stack)
    assert first.address != second.address


def test_what_is_sent_together_arrives_in_order_however_much_it_is(stack: ExitStack) -> None:
    server = router(stack)
    worker = dealer(stack, server.address)
    sent = [
        RequestFailed(coordinator=1, dispatch=i, kind="internal", message="")
        for i in range(message_socket.MAX_TOGETHER + 5)
    ]
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
    peer.send_multipart([encode(HELLO)] * (message_socket.MAX_TOGETHER + 1))
    peer.send(encode(HELLO))
    received: list[object] = []
    until(lambda: received.extend(message for _, message in server.receive(10)) or len(received) >= 3)
    assert received == [HELLO] * 3
    assert server.counters.bad == 2


def test_bad_messages_of_a_member_are_dropped_and_counted(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_socket, "LOG_EVERY_S", 1e9)
    server = router(stack)
    peer = raw_socket(stack, server.address)
    bad = [
        b"",
        b"\xff\xff",
        encode(WELCOME),
        encode(Ack(coordinator=1, dispatch=1, lease=1)),
        encode(HELLO)[:-1],
    ]
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


def test_sending_to_a_full_queue_drops_and_counts_and_never_blocks(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_port_that_is_taken_is_not_shared(stack: ExitStack) -> None:
    server = router(stack, KEY)
    for key in (KEY, new_key(), None):
        with pytest.raises(AddressError, match="Address already in use"):
            RouterChannel.bind(server.address, key, FROM_WORKER)
