"""Processes of neighbouring wire versions work together; others part with a sentence."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import EXAMPLES, fields_of, structs_in
from support.recorded_wire import FOLDER, breaks, present_messages, present_shape, recorded

from splitserve.transport.errors import BadMessage
from splitserve.transport.messages import messages as m
from splitserve.transport.messages.codec import WIRE, decode, encode
from splitserve.transport.messages.fields import WIRE_VERSION, is_neighbour

EVERY_TYPE = tuple(kind for kind, _ in WIRE.values())
VERSIONS = sorted(int(file.stem) for file in FOLDER.glob("*.json"))
NEIGHBOURS = [version for version in VERSIONS if is_neighbour(version)]
RENEW = "raise WIRE_VERSION and run `python -m support.recorded_wire`; keep the earlier files"


def test_the_recorded_messages_of_this_version_are_those_that_are_sent() -> None:
    """A new field, bound or type is a new version: by one if an older process can skip it, else by two."""
    assert VERSIONS[-1] == WIRE_VERSION, RENEW
    assert recorded(WIRE_VERSION)["messages"] == present_messages(), RENEW
    assert recorded(WIRE_VERSION)["shape"] == present_shape(), RENEW


@pytest.mark.parametrize("version", NEIGHBOURS)
def test_every_message_of_a_neighbour_is_understood(version: int) -> None:
    record = recorded(version)
    assert breaks(record["shape"], present_shape()) == [], "raise WIRE_VERSION by two"
    for name, data in record["messages"].items():
        sent = msgspec.msgpack.decode(bytes.fromhex(data)[1:])
        found = decode(bytes.fromhex(data), EVERY_TYPE)
        assert type(found).__name__ == name
        assert _within(sent, fields_of(found)), name


def _within(sent: Any, found: Any) -> bool:
    """Return whether all that was sent was found."""
    if isinstance(sent, dict):
        return all(key in found and _within(value, found[key]) for key, value in sent.items())
    return bool(sent == found)


@pytest.mark.parametrize("name", ["Hello", "Meet"])
@pytest.mark.parametrize("version", [v for v in VERSIONS if not is_neighbour(v)])
def test_of_other_versions_nothing_but_the_version_is_read(name: str, version: int) -> None:
    found = decode(bytes.fromhex(recorded(version)["messages"][name]), EVERY_TYPE)
    assert found == m.OtherVersion(wire_version=version)
    assert f"wire version {version} there, {WIRE_VERSION} here" in found.sentence
    assert "upgrade that one" in found.sentence


@pytest.mark.parametrize("kind", [m.Hello, m.Meet])
def test_the_version_is_read_whatever_else_the_message_holds(kind: type[m.Message]) -> None:
    fields = fields_of(next(one for one in EXAMPLES if type(one) is kind))
    assert next(iter(fields)) == "wire_version", "it is first"
    for distance in (2, 40):
        later = {"wire_version": WIRE_VERSION + distance, "fields_of_tomorrow": [1, {}]}
        found = decode(_tag(kind) + msgspec.msgpack.encode(later), EVERY_TYPE)
        assert isinstance(found, m.OtherVersion)
        assert "upgrade this process" in found.sentence
        assert decode(_tag(kind) + msgspec.msgpack.encode({**fields, **later}), EVERY_TYPE) == found
    for version in (-1, 1 << 16, "3", None):
        with pytest.raises(BadMessage, match=kind.__name__):
            decode(_tag(kind) + msgspec.msgpack.encode({**fields, "wire_version": version}), EVERY_TYPE)


def test_the_answer_to_another_version_never_changes() -> None:
    assert encode(m.OtherVersion(wire_version=7)) == b"\x18\x81\xacwire_version\x07"


_NEW_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EXAMPLES), _NEW_VALUES, st.data())
def test_fields_of_a_newer_process_are_skipped_at_any_depth(
    example: m.Message, value: Any, data: st.DataObject
) -> None:
    fields = fields_of(example)
    places = [fields] + [inner for inner in structs_in(example, fields) if data.draw(st.booleans())]
    for place in places:
        place["since_next"] = value
    assert decode(_tag(type(example)) + msgspec.msgpack.encode(fields), EVERY_TYPE) == example


def test_a_new_field_may_not_exceed_the_messages_size_or_nest_without_end() -> None:
    ack = {"coordinator": 1, "dispatch": 2, "lease": 3}
    large = b"\x33" + msgspec.msgpack.encode({**ack, "more": bytes(70_000)})
    with pytest.raises(BadMessage, match=r"Ack of 700.. bytes; at most 65536 are allowed"):
        decode(large, EVERY_TYPE)
    deep = b"\x33\x84" + msgspec.msgpack.encode(ack)[1:] + b"\xa4more" + b"\x91" * 20_000 + b"\xc0"
    with pytest.raises(BadMessage, match="Ack: "):
        decode(deep, EVERY_TYPE)


def test_a_change_that_an_older_process_cannot_skip_is_found() -> None:
    old = present_shape()
    new = deepcopy(old)
    new["Ack"]["note"] = {"type": "string", "required": False}
    new["Later"] = {"text": {"type": "string", "required": True}}
    new["RequestFailed"]["kind"]["enum"] = [*old["RequestFailed"]["kind"]["enum"], "later"]
    assert breaks(old, new) == []
    assert breaks(new, old) == ["Ack.note is gone", "Later is gone", "RequestFailed.kind has changed"]
    new["Ack"]["note"]["required"] = True
    new["Cancel"]["dispatches"]["maxLength"] += 1
    assert breaks(old, new) == ["Ack.note is required", "Cancel.dispatches has changed"]


def _tag(kind: type[m.Message]) -> bytes:
    return next(bytes([tag]) for tag, (other, _) in WIRE.items() if other is kind)
