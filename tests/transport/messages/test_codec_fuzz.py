"""Arbitrary, changed and wrong bytes: decoded or refused, never a crash."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.message_types import _fields, _tag, decodes_or_is_bad
from support.messages import EXAMPLES

from splitserve.transport.messages import messages as m
from splitserve.transport.messages.codec import WIRE, encode


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
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_wrong_values_in_right_fields(example: m.Message, data: st.DataObject) -> None:
    fields = _fields(example)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(_VALUES)
    decodes_or_is_bad(_tag(type(example)) + msgspec.msgpack.encode(fields))
