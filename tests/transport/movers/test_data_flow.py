"""The ``tcp`` mover's data connections as they open, end, clog and come back."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack
from threading import Event

import numpy as np
import pytest
from support.data_connections import MODES, RawPeer, body, frame, header, new_source, new_target, receive
from support.kv_pools import DEADLINE_S, NUM_BLOCKS, SECRET, arrivals, empty_pool, filled_pool, until

from splitserve.transport.errors import AddressError, MoverError
from splitserve.transport.messages.messages import Met
from splitserve.transport.movers.lease_book import LeaseBook
from splitserve.transport.movers.opening import open_source
from splitserve.transport.movers.tcp import source as tcp_source
from splitserve.transport.movers.tcp.inbound import Inbound
from splitserve.transport.movers.tcp.source import TcpSource
from splitserve.transport.movers.tcp.target import TcpTarget
from splitserve.transport.movers.tcp.wire import HELLO_BYTES, PLAIN, DataAddress


@MODES
def test_closing_a_lease_stops_its_puts(stack: ExitStack, mode: int) -> None:
    source_pool = filled_pool()
    target, pool = new_target(stack)
    source = new_source(stack, target, source_pool, mode)
    target.open(1, SECRET, {0: 3})
    target.open(2, SECRET, {0: 4})
    target.close(1)
    source.put(1, SECRET, [(0, 10, 3)])
    source.put(2, SECRET, [(0, 11, 4)])
    assert arrivals(target, 1, source) == [(2, 0)]
    assert not pool[3].any()
    assert target.dropped == {"lease": 1}


@MODES
def test_closing_a_lease_stops_a_put_that_has_begun(stack: ExitStack, mode: int) -> None:
    """Not a byte is written after ``close``, and the connection goes on."""
    target, pool = new_target(stack)
    target.open(1, SECRET, {0: 3})
    target.open(2, SECRET, {0: 4})
    peer = RawPeer(stack, target, mode)
    data = frame(header(1, positions=(0,)), body(), peer.seal)
    peer.stream.sendall(data[: len(data) // 2])
    until(lambda: mode != PLAIN or pool[3, 0].any())
    target.close(1)
    pool[3] = 0
    peer.stream.sendall(data[len(data) // 2 :])
    peer.send(header(2), body())
    assert arrivals(target, 1) == [(2, 0)]
    assert not pool[3].any()


@MODES
def test_a_put_cut_short_may_come_again(stack: ExitStack, mode: int) -> None:
    target, pool = new_target(stack)
    target.open(1, SECRET, {0: 3})
    peer = RawPeer(stack, target, mode)
    peer.stream.sendall(frame(header(1), body(), peer.seal)[:-1])
    peer.stream.close()
    source_pool = filled_pool()
    source = new_source(stack, target, source_pool, mode)
    deadline = time.monotonic() + DEADLINE_S
    while not target.poll(
        1
    ):  # until the end of the first connection was noticed, the second one's parcel is one too many
        assert time.monotonic() < deadline
        source.put(1, SECRET, [(0, 10, 3)])
        until(lambda: source.poll())
    assert np.array_equal(pool[3], source_pool[10])


@MODES
def test_a_block_is_written_again_only_when_asked_for(stack: ExitStack, mode: int) -> None:
    source_pool = filled_pool()
    target, pool = new_target(stack)
    source = new_source(stack, target, source_pool, mode)
    target.open(1, SECRET, {0: 3, 1: 4})
    source.put(1, SECRET, [(0, 10, 3)])
    assert arrivals(target, 1, source) == [(1, 0)]
    source.put(1, SECRET, [(0, 11, 3)])
    source.put(1, SECRET, [(1, 12, 4)])
    assert arrivals(target, 1, source) == [(1, 1)]
    assert np.array_equal(pool[3], source_pool[10])
    target.expect_again(1, [0])
    source.put(1, SECRET, [(0, 11, 3)])
    assert arrivals(target, 1, source) == [(1, 0)]
    assert np.array_equal(pool[3], source_pool[11])


@MODES
def test_a_parcel_that_is_complete_comes_no_second_time_when_its_connection_ends(
    stack: ExitStack, mode: int
) -> None:
    """Nor does the end of its lease touch the parcel that follows on that connection."""
    target, _ = new_target(stack)
    target.open(1, SECRET, {0: 3, 1: 4})
    peer = RawPeer(stack, target, mode)
    peer.send(header(1), body())
    assert arrivals(target, 1) == [(1, 0)]
    peer.stream.close()
    until(lambda: not target._server._connections)
    again = RawPeer(stack, target, mode)
    again.send(header(1), body())
    again.send(header(1, positions=(1,)), body())
    assert arrivals(target, 1) == [(1, 1)]
    assert target.dropped == {"position": 1}
    target.close(1)
    target.open(2, SECRET, {0: 5})
    again.send(header(2), body())
    assert arrivals(target, 1) == [(2, 0)]


@MODES
def test_all_that_close_must_stop_happens_with_its_lock_held(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    target, _ = new_target(stack)
    held: dict[str, bool] = {}

    def watch(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watched(*arguments: object) -> object:
            held[name] = held.get(name, True) and target._lock._is_owned()  # type: ignore[attr-defined]
            return method(*arguments)

        monkeypatch.setattr(owner, name, watched)

    for name in ("claim", "complete", "give_back"):
        watch(LeaseBook, name)
    watch(Inbound, "safe")
    watch(Inbound, "_store")
    target.open(1, SECRET, {0: 3, 1: 4})
    peer = RawPeer(stack, target, mode)
    peer.send(header(1), body())
    assert arrivals(target, 1) == [(1, 0)]
    peer.stream.sendall(frame(header(1, positions=(1,)), body(), peer.seal)[:-1])
    peer.stream.close()
    until(lambda: "give_back" in held)
    assert held == dict.fromkeys(held, True)
    assert ("_store" in held) == (mode != PLAIN)


def test_the_loop_is_woken_until_it_has_taken_all_that_arrived(stack: ExitStack) -> None:
    target, _ = new_target(stack)
    source = new_source(stack, target, filled_pool())
    target.open(1, SECRET, {0: 3, 1: 4})
    source.put(1, SECRET, [(0, 10, 3), (1, 11, 4)])
    until(lambda: len(target._arrivals) == 2)
    for left in (True, False):
        assert len(target.poll(1)) == 1
        assert bool(select.select([target.fd], [], [], 0)[0]) == left


def test_a_closed_source_leaves_no_thread_and_no_connection(stack: ExitStack) -> None:
    target, _ = new_target(stack)
    source = new_source(stack, target, filled_pool())
    target.open(1, SECRET, {0: 3})
    source.put(1, SECRET, [(0, 10, 3)])
    assert arrivals(target, 1, source) == [(1, 0)]
    source.close()
    for connection in source._connections:
        connection.join(DEADLINE_S)
        assert not connection.is_alive()
    until(lambda: not target._server._connections)


def test_a_receiver_that_is_away_for_a_moment_is_tried_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, refusals = tcp_source._Connection._open_stream, [ConnectionRefusedError() for _ in range(3)]

    def refused_at_first(connection: tcp_source._Connection) -> None:
        if refusals:
            raise refusals.pop()
        connect(connection)

    monkeypatch.setattr(tcp_source._Connection, "_open_stream", refused_at_first)
    target, _ = new_target(stack)
    source = new_source(stack, target, filled_pool())
    target.open(1, SECRET, {0: 3})
    source.put(1, SECRET, [(0, 10, 3)])
    assert arrivals(target, 1, source) == [(1, 0)]
    assert not refusals


def test_a_receiver_that_hangs_up_in_the_handshake_is_an_error(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_source, "RETRY_S", 0.0)
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    address = DataAddress("127.0.0.1", listener.getsockname()[1], bytes(32), False)
    source = TcpSource(str(address), filled_pool())
    stack.callback(source.close)
    stream = stack.enter_context(listener.accept()[0])
    receive(stream, HELLO_BYTES)
    stream.close()
    with pytest.raises(MoverError, match="it ended the connection"):
        until(lambda: source.poll() and False)


def test_a_receiver_that_is_gone_blocks_nobody_and_is_an_error_in_time(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_source, "RETRY_S", 0.3)
    connect, asked = tcp_source._Connection._open_stream, Event()
    monkeypatch.setattr(
        tcp_source._Connection, "_open_stream", lambda self: asked.wait(DEADLINE_S) and connect(self)
    )
    target, _ = new_target(ExitStack())
    data_address = target.data_address("127.0.0.1")
    target.close_all()
    source = TcpSource(data_address, filled_pool())
    stack.callback(source.close)
    items = [(position, position, position) for position in range(NUM_BLOCKS)]
    for lease in range(3):
        source.put(lease, SECRET, items)
    assert source.pending() == 3 * NUM_BLOCKS
    source.cancel(2)
    assert source.pending() == 2 * NUM_BLOCKS
    asked.set()
    with pytest.raises(MoverError, match="cannot reach the decode worker"):
        until(lambda: source.poll() and False)
    with pytest.raises(MoverError, match="cannot reach the decode worker"):
        source.put(1, SECRET, items)
    start = time.monotonic()
    source.close()
    assert time.monotonic() - start < tcp_source.CONNECT_TIMEOUT_S / 2


def test_a_receiver_that_comes_back_is_connected_to_again(stack: ExitStack) -> None:
    target, _ = new_target(stack)
    source = new_source(stack, target, filled_pool())
    target.open(1, SECRET, {0: 3, 1: 4})
    source.put(1, SECRET, [(0, 10, 3)])
    assert arrivals(target, 1, source) == [(1, 0)]
    for connection in source._connections:
        connection.interrupt()  # what a lost network does
    source.put(1, SECRET, [(1, 11, 4)])
    assert arrivals(target, 1, source) == [(1, 1)]


@MODES
def test_a_slow_receiver_bounds_what_is_under_way(stack: ExitStack, mode: int) -> None:
    """Blocks beyond the sockets' buffers wait at the sender as numbers; all arrive once the receiver takes
    them in."""
    target, _ = new_target(stack)
    source = new_source(stack, target, filled_pool(), mode)
    rounds = 30
    for lease in range(rounds):
        target.open(lease, SECRET, {position: position for position in range(NUM_BLOCKS)})
    with target._lock:  # the receiver is slow
        for lease in range(rounds):
            source.put(lease, SECRET, [(position, position, position) for position in range(NUM_BLOCKS)])
        assert source.pending() > 0
    arrived = arrivals(target, rounds * NUM_BLOCKS, source)
    assert len(set(arrived)) == rounds * NUM_BLOCKS
    until(lambda: source.poll() or source.pending() == 0)
    assert len(source._connections) > 1, "a backlog opens more connections"


def test_bad_addresses_are_errors_with_a_sentence(stack: ExitStack) -> None:
    with pytest.raises(AddressError, match="cannot listen on nonsense"):
        TcpTarget("nonsense", empty_pool())
    target, _ = new_target(stack)
    with pytest.raises(AddressError, match="choose another address"):
        TcpTarget(target.data_address("127.0.0.1").split("#")[0], empty_pool())
    for text in (
        "nonsense",
        "tcp://h:1",
        "tcp://h:1#ab",
        "tcp://h:0#" + "ab" * 32,
        "tcp://h:1#" + "ab" * 32 + "#more",
    ):
        with pytest.raises(MoverError, match="expected tcp://host:port") as caught:
            TcpSource(text, filled_pool())
        assert "abab" not in str(caught.value), "the secret stays out of errors"
    with pytest.raises(MoverError, match="asks for the mover 'rdma'"):
        open_source(Met(worker_id="d0", incarnation=1, mover="rdma"), empty_pool())


def test_ipv6(stack: ExitStack) -> None:
    try:
        target = TcpTarget("tcp://[::1]:*", empty_pool())
    except AddressError:
        pytest.skip("this machine has no IPv6 loopback")
    stack.callback(target.close_all)
    target.open(1, SECRET, {0: 3})
    source = TcpSource(target.data_address("::1"), filled_pool())
    stack.callback(source.close)
    source.put(1, SECRET, [(0, 10, 3)])
    assert arrivals(target, 1, source) == [(1, 0)]
