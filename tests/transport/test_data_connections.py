"""The ``zmq`` mover's data connections: who may write what, sealed or plain, and what becomes of everything else."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv_pools import (
    BLOCK_BYTES,
    DEADLINE_S,
    LAYER_BYTES,
    NUM_BLOCKS,
    NUM_LAYERS,
    SECRET,
    arrivals,
    empty_pool,
    filled_pool,
    until,
)

from splitserve.transport.errors import AddressError, MoverError
from splitserve.transport.messages import Met
from splitserve.transport.movers import tcp_source, tcp_target
from splitserve.transport.movers.data_address import DataAddress, endpoint
from splitserve.transport.movers.interface import Pool
from splitserve.transport.movers.opening import open_source
from splitserve.transport.movers.parcel import (
    RECORD_BYTES,
    SIZE,
    ParcelHeader,
    pack_header,
    records,
    slices_per_parcel,
    spans,
    unpack_header,
)
from splitserve.transport.movers.session import ANSWER_BYTES, HELLO_BYTES, NONCE_BYTES, PLAIN, SEALED, TAG_BYTES, Hello, Seal, Transcript
from splitserve.transport.movers.tcp_source import TcpSource
from splitserve.transport.movers.tcp_target import TcpTarget

MODES = pytest.mark.parametrize("mode", [PLAIN, SEALED], ids=["plain", "sealed"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def new_target(stack: ExitStack, takes_plain: bool = True) -> tuple[TcpTarget, Pool]:
    pool = empty_pool()
    target = TcpTarget("tcp://127.0.0.1:*", pool, takes_plain)
    stack.callback(target.close_all)
    return target, pool


def new_source(stack: ExitStack, target: TcpTarget, pool: Pool, mode: int = SEALED) -> TcpSource:
    source = TcpSource(target.data_address("127.0.0.1"), pool, mode == PLAIN)
    stack.callback(source.close)
    return source


class RawPeer:
    """One that says whatever it likes, by default after a handshake as it should be."""

    def __init__(self, stack: ExitStack, target: TcpTarget, mode: int = PLAIN, secret: bytes | None = None) -> None:
        address = DataAddress.parse(target.data_address("127.0.0.1"))
        self.stream = stack.enter_context(socket.create_connection((address.host, address.port), DEADLINE_S))
        hello = Hello(mode, bytes(NONCE_BYTES))
        self.stream.sendall(hello.pack())
        answer = receive(self.stream, ANSWER_BYTES)
        transcript = Transcript(secret or address.secret, hello, answer[:NONCE_BYTES])
        self.seal = transcript.seal()
        self.stream.sendall(transcript.client_proof)

    def send(self, header: bytes, body: bytes) -> None:
        with suppress(ConnectionError):  # the target may have hung up on us
            self.stream.sendall(frame(header, body, self.seal))

    def ended(self) -> bool:
        """Whether the target hangs up; with a deadline."""
        try:
            return self.stream.recv(1) == b""
        except ConnectionError:
            return True


def receive(stream: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or fewer where the stream ends before."""
    data = b""
    while len(data) < num_bytes and (part := stream.recv(num_bytes - len(data))):
        data += part
    return data


def frame(header: bytes, body: bytes, seal: Seal | None) -> bytes:
    if seal is None:
        return SIZE.pack(len(header)) + header + body
    parts = [header, *(body[at : at + RECORD_BYTES] for at in range(0, len(body), RECORD_BYTES))]
    sealed = [bytearray(len(part) + TAG_BYTES) for part in parts]
    for part, into in zip(parts, sealed, strict=True):
        seal.close_into(part, memoryview(into))
    return SIZE.pack(len(sealed[0])) + b"".join(sealed)


def header(lease: int = 9, secret: bytes = SECRET, offset: int = 0, length: int = BLOCK_BYTES, positions: tuple[int, ...] = (0,)) -> bytes:
    return pack_header(ParcelHeader(lease, secret, offset, length, positions))


def body(num_blocks: int = 1) -> bytes:
    return bytes([7]) * BLOCK_BYTES * num_blocks


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
        header() + bytes(4 * slices_per_parcel(LAYER_BYTES)),
        bytes(100_000),
    ],
)
def test_a_malformed_header_ends_the_connection_and_nothing_else(stack: ExitStack, mode: int, bad: bytes) -> None:
    target, pool = new_target(stack)
    target.open(9, SECRET, {0: 3, 1: 4})
    peer = RawPeer(stack, target, mode)
    peer.send(bad, b"")
    assert peer.ended()
    assert target.dropped == Counter({"malformed": 1})
    RawPeer(stack, target, mode).send(header(positions=(1,)), body())
    assert arrivals(target, 1) == [(9, 1)]
    assert not np.delete(pool, 4, axis=0).any()


def test_a_stranger_gets_nothing_through(stack: ExitStack) -> None:
    target, pool = new_target(stack)
    target.open(9, SECRET, {0: 3, 1: 4})
    for mode in (PLAIN, SEALED):
        peer = RawPeer(stack, target, mode, secret=b"not the secret at all, but as long"[:32])
        peer.send(header(), body())
        assert peer.ended()
    RawPeer(stack, target).send(header(positions=(1,)), body())
    assert arrivals(target, 1) == [(9, 1)]
    assert not pool[3].any()
    assert target.dropped == Counter({"stranger": 2})


def test_what_is_not_sealed_is_taken_only_where_both_ends_say_so(stack: ExitStack) -> None:
    target, _ = new_target(stack, takes_plain=False)
    target.open(9, SECRET, {0: 3})
    peer = RawPeer(stack, target, PLAIN)
    peer.send(header(), body())
    assert peer.ended()
    assert target.dropped == Counter({"plain": 1})
    source = new_source(stack, target, filled_pool(), PLAIN)  # it heard that the target takes nothing in the clear
    source.put(9, SECRET, [(0, 1, 3)])
    assert arrivals(target, 1) == [(9, 0)]


def test_sealed_blocks_are_not_to_be_seen_on_the_wire(stack: ExitStack) -> None:
    """A listener between the two sees neither the blocks nor the grant's secret; in the mode plain it sees both."""
    source_pool = filled_pool()
    for mode in (PLAIN, SEALED):
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
    peer = RawPeer(stack, target, SEALED)
    first, second = (frame(header(positions=(position,)), body(), peer.seal) for position in (0, 1))
    flipped = bytearray(first)
    flipped[-1] ^= 1
    said = {"flip": bytes(flipped), "repeat": first + first, "leave out": second, "swap": second + first}[damage]
    with suppress(ConnectionError):
        peer.stream.sendall(said)
    assert peer.ended()
    assert target.dropped == Counter({"forged": 1})
    assert len(target.poll(9)) == (damage == "repeat")
    RawPeer(stack, target, SEALED).send(header(positions=(2,)), body())
    assert arrivals(target, 1) == [(9, 2)]


def test_a_source_trusts_only_the_one_it_was_sent_to(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who took over the port of a decode worker that has ended gets no block."""
    monkeypatch.setattr(tcp_source, "RETRY_S", 0.2)
    target, _ = new_target(stack)
    address = DataAddress.parse(target.data_address("127.0.0.1"))
    elsewhere = DataAddress(address.host, address.port, bytes(32), True)
    source = TcpSource(str(elsewhere), filled_pool())
    stack.callback(source.close)
    source.put(9, SECRET, [(0, 1, 3)])
    with pytest.raises(MoverError, match="not that decode worker"):
        until(lambda: source.poll() and False)
    assert source.pending() == 1


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
    until(lambda: mode == SEALED or pool[3, 0].any())
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
    while not target.poll(1):  # until the end of the first connection was noticed, the second one's parcel is one too many
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


def test_a_receiver_that_is_gone_blocks_nobody_and_is_an_error_in_time(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_source, "RETRY_S", 0.3)
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
    with pytest.raises(MoverError, match="cannot reach the decode worker"):
        until(lambda: source.poll() and False)
    with pytest.raises(MoverError, match="cannot reach the decode worker"):
        source.put(1, SECRET, items)
    start = time.monotonic()
    source.close()
    assert time.monotonic() - start < 2.0


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
    """Blocks beyond the sockets' buffers wait at the sender as numbers; all arrive once the receiver takes them in."""
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


def test_strangers_have_little_time_and_are_few(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_target, "HANDSHAKE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tcp_target, "MAX_STRANGERS", 2)
    target, _ = new_target(stack)
    address = DataAddress.parse(target.data_address("127.0.0.1"))
    silent = [stack.enter_context(socket.create_connection((address.host, address.port), DEADLINE_S)) for _ in range(3)]
    for stream in silent:
        assert stream.recv(1) == b""
    assert target.dropped == Counter({"stranger": 3})


def test_bad_addresses_are_errors_with_a_sentence(stack: ExitStack) -> None:
    with pytest.raises(AddressError, match="cannot listen on nonsense"):
        TcpTarget("nonsense", empty_pool())
    target, _ = new_target(stack)
    with pytest.raises(AddressError, match="choose another address"):
        TcpTarget(target.data_address("127.0.0.1").split("#")[0], empty_pool())
    for text in ("nonsense", "tcp://h:1", "tcp://h:1#ab", "tcp://h:0#" + "ab" * 32, "tcp://h:1#" + "ab" * 32 + "#more"):
        with pytest.raises(MoverError, match="expected tcp://host:port") as caught:
            TcpSource(text, filled_pool())
        assert "abab" not in str(caught.value), "the secret stays out of errors"
    with pytest.raises(MoverError, match="asks for the mover 'rdma'"):
        open_source(Met(worker_id="d0", incarnation=1, mover="rdma"), empty_pool())


def test_data_addresses_travel_as_text() -> None:
    for address in (DataAddress("fd00::1", 7711, bytes(range(32)), True), DataAddress("node-7", 1, bytes(32), False)):
        assert DataAddress.parse(str(address)) == address
    assert endpoint("tcp://*:*") == ("*", 0)
    assert endpoint("tcp://[::]:70000") is None


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


# --- the formats ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=120))
def test_no_bytes_break_the_header(data: bytes) -> None:
    for candidate in (data, header()[:8] + data, header() + data):
        parsed = unpack_header(candidate, 8)
        if parsed is not None:
            assert pack_header(parsed) == candidate
            assert 1 <= len(parsed.positions) <= 8


PATTERN: Pool = filled_pool()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=40), st.integers(0, NUM_LAYERS - 1), st.data())
def test_spans_and_records_cover_a_body_exactly_and_in_order(blocks: list[int], first: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, NUM_LAYERS - first))
    runs = spans(PATTERN, blocks, first * LAYER_BYTES, count * LAYER_BYTES)
    flat = PATTERN.reshape(-1)
    expected = PATTERN[blocks, first : first + count].tobytes()
    assert b"".join(flat[start:end].tobytes() for start, end in runs) == expected
    cut = list(records(runs))
    assert b"".join(flat[start:end].tobytes() for record in cut for start, end in record) == expected
    assert all(sum(end - start for start, end in record) == RECORD_BYTES for record in cut[:-1])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=6), st.booleans())
def test_no_bytes_break_the_target(parts: list[bytes], authenticated: bool) -> None:
    with ExitStack() as stack:
        target, pool = new_target(stack)
        target.open(9, SECRET, {0: 3, 1: 4})
        if authenticated:
            peer = RawPeer(stack, target)
            peer.send(b"".join(parts), b"")
        else:
            address = DataAddress.parse(target.data_address("127.0.0.1"))
            stream = stack.enter_context(socket.create_connection((address.host, address.port), DEADLINE_S))
            stream.sendall(b"".join(parts))
        RawPeer(stack, target).send(header(positions=(1,)), body())
        assert arrivals(target, 1) == [(9, 1)]
        assert not pool[3].any()
