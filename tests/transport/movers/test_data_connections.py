"""The ``tcp`` mover's data connections: which parcels are written, sealed or plain, and the fate of
everything else."""

from __future__ import annotations

import errno
import select
import selectors
import socket
from collections import Counter
from contextlib import ExitStack, suppress
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
from support.data_connections import MODES, RawPeer, body, frame, header, new_source, new_target, receive
from support.kv_pools import BLOCK_BYTES, DEADLINE_S, LAYER_BYTES, SECRET, arrivals, filled_pool, until

from splitserve.transport.errors import MoverError
from splitserve.transport.movers.lease_book import blocks_per_parcel
from splitserve.transport.movers.tcp import source as tcp_source
from splitserve.transport.movers.tcp import target as tcp_target
from splitserve.transport.movers.tcp.source import TcpSource
from splitserve.transport.movers.tcp.wire import (
    GCM,
    HELLO_BYTES,
    NONCE_BYTES,
    OCB,
    PLAIN,
    DataAddress,
    Hello,
    Transcript,
)


@MODES
@pytest.mark.parametrize(
    ("bad", "num_bytes", "reason"),
    [
        (header(lease=8), BLOCK_BYTES, "lease"),
        (header(secret=b"another secret !"), BLOCK_BYTES, "secret"),
        (header(positions=(2,)), BLOCK_BYTES, "position"),
        (header(positions=(0, 0)), 2 * BLOCK_BYTES, "position"),
        (header(length=BLOCK_BYTES - 1), BLOCK_BYTES - 1, "length"),
        (header(offset=1), BLOCK_BYTES, "length"),
        (header(offset=LAYER_BYTES), BLOCK_BYTES, "length"),
        (header(offset=1 << 60), BLOCK_BYTES, "length"),
    ],
)
def test_a_parcel_that_nobody_granted_is_dropped_and_touches_nothing(
    stack: ExitStack, mode: int, bad: bytes, num_bytes: int, reason: str
) -> None:
    """And the connection goes on."""
    target, pool = new_target(stack)
    target.open(9, SECRET, {0: 3, 1: 4})
    peer = RawPeer(stack, target, mode)
    peer.send(bad, bytes([7]) * num_bytes)
    peer.send(header(positions=(1,)), body())
    assert arrivals(target, 1) == [(9, 1)]
    assert target.dropped == Counter({reason: 1})
    assert pool[4].all()
    assert not np.delete(pool, 4, axis=0).any()


@MODES
@pytest.mark.parametrize(
    "bad",
    [
        header(length=0),
        header(length=BLOCK_BYTES + 1),
        header(length=(1 << 64) - 1),
        header()[:-4],
        header()[:-1],
        b"",
        b"XXXX" + header()[4:],
        header()[:4] + b"\x01" + header()[5:],
        header() + bytes(4 * blocks_per_parcel(LAYER_BYTES)),
        header(positions=tuple(range(60))),  # more bytes than a parcel may have
        bytes(100_000),
    ],
)
def test_a_malformed_header_ends_the_connection_and_nothing_else(
    stack: ExitStack, mode: int, bad: bytes
) -> None:
    target, pool = new_target(stack)
    target.open(9, SECRET, {0: 3, 1: 4})
    peer = RawPeer(stack, target, mode)
    peer.send(bad, b"")
    assert peer.ended()
    assert target.dropped == Counter({"malformed": 1})
    RawPeer(stack, target, mode).send(header(positions=(1,)), body())
    assert arrivals(target, 1) == [(9, 1)]
    assert not np.delete(pool, 4, axis=0).any()


def test_a_peer_that_vanished_without_a_word_takes_no_connection_for_good(stack: ExitStack) -> None:
    """A host without power sends no end. Each one that came later took one of MAX_CONNECTIONS."""
    target, _ = new_target(stack)
    RawPeer(stack, target)
    until(lambda: any(c.inbound.authenticated for c in [*target._server._connections.values()]))
    (stream,) = (connection.stream for connection in target._server._connections.values())
    assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    assert idle + stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000 <= 60


def test_a_stranger_gets_nothing_through(stack: ExitStack) -> None:
    target, pool = new_target(stack)
    target.open(9, SECRET, {0: 3, 1: 4})
    for mode in (PLAIN, GCM, OCB):
        peer = RawPeer(stack, target, mode, secret=b"not the secret at all, but as long"[:32])
        peer.send(header(), body())
        assert peer.ended()
    RawPeer(stack, target).send(header(positions=(1,)), body())
    assert arrivals(target, 1) == [(9, 1)]
    assert not pool[3].any()
    assert target.dropped == Counter({"stranger": 3})


def test_what_is_not_sealed_is_taken_only_where_both_ends_say_so(stack: ExitStack) -> None:
    target, _ = new_target(stack, takes_plain=False)
    target.open(9, SECRET, {0: 3})
    peer = RawPeer(stack, target, PLAIN)
    peer.send(header(), body())
    assert peer.ended()
    assert target.dropped == Counter({"plain": 1})
    source = new_source(
        stack, target, filled_pool(), PLAIN
    )  # it knows that the target takes nothing in the clear
    source.put(9, SECRET, [(0, 1, 3)])
    assert arrivals(target, 1) == [(9, 0)]


def test_sealed_blocks_are_not_to_be_seen_on_the_wire(stack: ExitStack) -> None:
    """A listener between the two sees neither the blocks nor the grant's secret; in the mode plain it sees
    both."""
    source_pool = filled_pool()
    for mode in (PLAIN, GCM, OCB):
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = DataAddress("127.0.0.1", listener.getsockname()[1], bytes(32), True)
        source = TcpSource(str(address), source_pool, mode == PLAIN)
        stack.callback(source.close)
        source.put(9, SECRET, [(0, 1, 3)])
        stream = stack.enter_context(listener.accept()[0])
        stream.settimeout(DEADLINE_S)
        hello = Hello.unpack(receive(stream, HELLO_BYTES))
        assert hello is not None
        transcript = Transcript(address.secret, hello, bytes(NONCE_BYTES))
        stream.sendall(transcript.server_nonce + transcript.server_proof)
        seen = receive(stream, BLOCK_BYTES)
        assert (SECRET in seen) == (mode == PLAIN)
        assert (source_pool[1].tobytes()[:64] in seen) == (mode == PLAIN)


@pytest.mark.parametrize("damage", ["flip", "repeat", "leave out", "swap"])
def test_a_sealed_record_that_was_tampered_with_does_not_open(stack: ExitStack, damage: str) -> None:
    target, _ = new_target(stack)
    target.open(9, SECRET, {0: 3, 1: 4, 2: 5})
    peer = RawPeer(stack, target, GCM)
    first, second = (frame(header(positions=(position,)), body(), peer.seal) for position in (0, 1))
    flipped = bytearray(first)
    flipped[-1] ^= 1
    data = {"flip": bytes(flipped), "repeat": first + first, "leave out": second, "swap": second + first}[
        damage
    ]
    with suppress(ConnectionError):
        peer.stream.sendall(data)
    assert peer.ended()
    assert target.dropped == Counter({"forged": 1})
    assert len(target.poll(9)) == (damage == "repeat")
    RawPeer(stack, target, GCM).send(header(positions=(2,)), body())
    assert arrivals(target, 1) == [(9, 2)]


def test_a_source_trusts_only_the_one_it_was_sent_to(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that took over the port of an ended decode worker gets no block."""
    monkeypatch.setattr(tcp_source, "RETRY_S", 0.2)
    target, pool = new_target(stack)
    address = DataAddress.parse(target.data_address("127.0.0.1"))
    elsewhere = DataAddress(address.host, address.port, bytes(32), True)
    source = TcpSource(str(elsewhere), filled_pool())
    stack.callback(source.close)

    def put() -> None:
        source.put(9, SECRET, [(0, 1, 3)])  # it may know already
        until(lambda: source.poll() and False)

    with pytest.raises(MoverError, match="not that decode worker"):
        put()
    assert not pool.any()


def test_strangers_have_little_time_and_are_few(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_target, "HANDSHAKE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tcp_target, "MAX_STRANGERS", 2)
    target, _ = new_target(stack)
    address = DataAddress.parse(target.data_address("127.0.0.1"))
    silent = [
        stack.enter_context(socket.create_connection((address.host, address.port), DEADLINE_S))
        for _ in range(3)
    ]
    for stream in silent:
        assert stream.recv(1) == b""
    assert target.dropped == Counter({"stranger": 3})


def test_a_stranger_that_speaks_while_it_is_sent_away_breaks_nothing(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one turn of the receiving thread: a newcomer, for which the oldest one has to go, and
    bytes of that one."""
    monkeypatch.setattr(tcp_target, "MAX_STRANGERS", 1)
    target, pool = new_target(stack)
    address, selector, together = (
        DataAddress.parse(target.data_address("127.0.0.1")),
        target._server._selector,
        Event(),
    )
    select_any = selector.select

    def select_both(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = select_any(timeout)
        while together.is_set() and len(events) == 1:
            events = select_any(DEADLINE_S)
        return sorted(events, key=lambda event: event[0].fileobj is not target._listener)

    monkeypatch.setattr(selector, "select", select_both)
    oldest = stack.enter_context(socket.create_connection((address.host, address.port), DEADLINE_S))
    until(lambda: target._server._connections)
    together.set()
    stack.enter_context(socket.create_connection((address.host, address.port), DEADLINE_S))
    oldest.sendall(b"S")
    with suppress(ConnectionResetError):
        assert oldest.recv(1) == b""
    together.clear()
    source = new_source(stack, target, filled_pool())
    target.open(9, SECRET, {0: 3})
    source.put(9, SECRET, [(0, 1, 3)])
    assert arrivals(target, 1, source) == [(9, 0)]
    assert pool[3].any()


def test_without_a_descriptor_left_the_receiving_thread_pauses(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener stays readable: it would be asked without end."""
    target, _ = new_target(stack)
    pauses: list[object] = []

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(target._server, "_listener", SimpleNamespace(accept=refuse))
        pause = SimpleNamespace(select=lambda *arguments: pauses.append(arguments[3]))
        patch.setattr(tcp_target, "select", pause)  # its own: a cluster's keeper selects beside this test
        target._server._accept()
    assert pauses == [tcp_target.ACCEPT_PAUSE_S]
    assert "cannot accept a connection for KV blocks: Too many open files" in caplog.text


def test_a_receiving_thread_that_ends_by_a_mistake_is_an_error_and_no_silence(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = new_target(stack)
    monkeypatch.setattr(target._server, "_accept", lambda: [][0])
    address = DataAddress.parse(target.data_address("127.0.0.1"))
    with suppress(
        ConnectionError
    ):  # the thread ends as it accepts, so the listener may be gone before this call is back
        stack.enter_context(socket.create_connection((address.host, address.port), DEADLINE_S))
    assert select.select([target.fd], [], [], DEADLINE_S)[0], "the worker's loop wakes"
    with pytest.raises(MoverError, match="nobody receives KV blocks any more: IndexError"):
        target.poll(1)


def test_a_sending_thread_that_ends_by_a_mistake_is_an_error_and_no_silence(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = new_target(stack)
    monkeypatch.setattr(tcp_source, "pack_header", lambda header: [][0])
    source = new_source(stack, target, filled_pool())
    source.put(9, SECRET, [(0, 1, 3)])
    with pytest.raises(MoverError, match="cannot send KV blocks: IndexError"):
        until(lambda: source.poll() and False)
