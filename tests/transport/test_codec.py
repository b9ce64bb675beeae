"""The codec: every message survives the trip, and no bytes whatever do anything but decode or raise BadMessage."""

from __future__ import annotations

import contextlib
import time
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import EXAMPLES, STEP

from splitserve.transport import messages as m
from splitserve.transport.codec import WIRE, Bounds, decode, encode
from splitserve.transport.errors import BadMessage

EVERY_TYPE = tuple(kind for kind, _ in WIRE.values())


def decodes_or_is_bad(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(data, EVERY_TYPE)


def test_every_message_type_has_a_tag_and_survives_the_trip() -> None:
    everything = m.FROM_WORKER + m.FROM_COORDINATOR + m.FROM_PREFILL + m.FROM_DECODE
    assert set(everything) == set(EVERY_TYPE) == {type(example) for example in EXAMPLES}
    for example in EXAMPLES:
        assert decode(encode(example), everything) == example


def test_a_message_for_somebody_else_is_refused() -> None:
    with pytest.raises(BadMessage, match="Welcome is not a message for this receiver"):
        decode(encode(m.Welcome(coordinator=1, heartbeat_s=1.0)), m.FROM_WORKER)


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"", "empty message"),
        (b"\xff\x80", "unknown message tag 255"),
        (b"\x33", "Ack: "),
        (b"\x33\x80", "Ack: coordinator: Field required"),
        (b"\x33" + msgpack.packb({"coordinator": 1, "dispatch": 2, "lease": "3"}), "Ack: lease: Input should be a valid integer"),
        (b"\x33" + msgpack.packb({"coordinator": 1, "dispatch": 2, "lease": 3, "more": 4}), "Ack: more: Extra inputs"),
        (b"\x33" + msgpack.packb({"coordinator": 1, "dispatch": 2, "lease": 3}) + b"\x00", "Ack: .*extra data"),
        (b"\x33" + bytes(70_000), "Ack of 70000 bytes; at most"),
        (b"\x33\xdd\xff\xff\xff\xff", "Ack: "),
        (b"\x33" + b"\x91" * 60_000 + b"\x00", "Ack: "),
    ],
)
def test_bad_bytes_are_refused_with_a_reason(payload: bytes, complaint: str) -> None:
    with pytest.raises(BadMessage, match=complaint):
        decode(payload, EVERY_TYPE)


def test_columns_of_a_step_must_fit_together() -> None:
    fields = STEP.model_dump()
    with pytest.raises(BadMessage, match="StepTokens"):
        decode(b"\x06" + msgpack.packb({**fields, "tokens": fields["tokens"][:-4]}), EVERY_TYPE)
    with pytest.raises(BadMessage, match="whole"):
        decode(b"\x13" + msgpack.packb({"coordinator": 1, "dispatches": b"12345"}), EVERY_TYPE)


def test_declared_sizes_reserve_no_memory() -> None:
    """The costliest lies: huge lists that are not there, and as many containers as fit."""
    first_token, limit = 4, 32 << 20
    lies = [
        bytes([first_token]) + b"\xdd\x00\x10\x00\x00" * 400,
        bytes([first_token]) + b"\xdf\x00\x10\x00\x00" * 400,
        b"\x33" + b"\xdd\x00\x00\xea\x60" + b"\x80" * 60_000,
        b"\x06\x9f" + b"\x9f" * 15 * 1000 + b"\xc0" * 200_000,
    ]
    tracemalloc.start()
    for lie in lies:
        decodes_or_is_bad(lie)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < limit


def test_a_message_too_large_for_its_receiver_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.transport.codec._TAGS", {m.Ack: (b"\x33", Bounds(max_bytes=4))})
    with pytest.raises(BadMessage, match="at most 4 are allowed"):
        encode(m.Ack(coordinator=1, dispatch=2, lease=3))


@settings(max_examples=600, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes(data: bytes) -> None:
    decodes_or_is_bad(data)
    for tag in WIRE:
        decodes_or_is_bad(bytes([tag]) + data)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_mutated_messages(example: m.Message, data: st.DataObject) -> None:
    wire = bytearray(encode(example))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(wire)))
        end = min(len(wire), start + data.draw(st.integers(0, 6)))
        wire[start:end] = data.draw(st.binary(max_size=6))
    decodes_or_is_bad(bytes(wire))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_wrong_values_in_right_fields(example: m.Message, data: st.DataObject) -> None:
    fields = example.model_dump()
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(_VALUES)
    tag = next(tag for tag, (kind, _) in WIRE.items() if kind is type(example))
    decodes_or_is_bad(bytes([tag]) + msgpack.packb(fields))


def test_a_step_of_64_rows_is_cheap() -> None:
    """Loose bound against accidents; the figure is about 11 us of a core."""
    best = min(_seconds_per_trip() for _ in range(20))
    assert best < 100e-6


def _seconds_per_trip() -> float:
    start = time.thread_time()
    for _ in range(50):
        decode(encode(STEP), m.FROM_WORKER)
    return (time.thread_time() - start) / 50
