"""The formats of data connections: no bytes break them."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_connections import RawPeer, body, header, new_target
from support.kv_pools import DEADLINE_S, LAYER_BYTES, NUM_BLOCKS, NUM_LAYERS, SECRET, arrivals, filled_pool

from splitserve.transport.movers.interface import Pool
from splitserve.transport.movers.lease_book import ParcelHeader
from splitserve.transport.movers.tcp.wire import (
    RECORD_BYTES,
    DataAddress,
    endpoint,
    pack_header,
    records,
    spans,
    unpack_header,
)


def test_data_addresses_travel_as_text() -> None:
    for address in (
        DataAddress("fd00::1", 7711, bytes(range(32)), True),
        DataAddress("node-7", 1, bytes(32), False),
    ):
        assert DataAddress.parse(str(address)) == address
    assert endpoint("tcp://*:*") == ("*", 0)
    assert endpoint("tcp://[::]:70000") is None


def test_a_header_names_as_many_positions_as_a_parcel_may_hold() -> None:
    longest = pack_header(ParcelHeader(9, SECRET, 0, LAYER_BYTES, tuple(range(8))))
    assert unpack_header(longest, 8) is not None
    assert unpack_header(longest, 7) is None


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
@given(
    st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=40),
    st.integers(0, NUM_LAYERS - 1),
    st.data(),
)
def test_spans_and_records_cover_a_body_exactly_and_in_order(
    blocks: list[int], first: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, NUM_LAYERS - first))
    runs = spans(PATTERN.shape, blocks, first * LAYER_BYTES, count * LAYER_BYTES)
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
