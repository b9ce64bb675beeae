"""The codec: every message survives the trip, and no bytes whatever do anything but decode or raise
BadMessage."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import inspect
from msgspec.structs import replace
from support.message_types import EVERY_TYPE, _fields, _tag, decodes_or_is_bad
from support.messages import EXAMPLES, SPEC, STEP

from splitserve.transport.errors import BadMessage
from splitserve.transport.messages import messages as m
from splitserve.transport.messages.codec import LONG_LIST, WIRE, Bounds, decode, encode


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
        (b"\x33\x80", "Ack: Object missing required field `coordinator`"),
        (
            b"\x33" + msgspec.msgpack.encode({"coordinator": 1, "dispatch": 2, "lease": "3"}),
            r"Ack: Expected `int`, got `str` - at `\$.lease`",
        ),
        (
            b"\x33" + msgspec.msgpack.encode({"coordinator": 1, "dispatch": 2, "lease": 3}) + b"\x00",
            "Ack: .*trailing characters",
        ),
        (b"\x34\x81\xa6reason\xa2\xff\xfe", "Nack: Object missing required field"),
        (b"\x01\x80", "Hello: Object missing required field `wire_version`"),
        (b"\x11\x82\xabcoordinator\x01\xa6reason\xa2\xff\xfe", "Fenced: 'utf-8' codec"),
        (b"\x33\x81\xa5lease\xd4\x01\x02", "Ack: Expected `int`, got `ext`"),
        (b"\x33" + bytes(70_000), "Ack of 70000 bytes; at most"),
        (b"\x33\xdd\xff\xff\xff\xff", "Ack: "),
        (b"\x33" + b"\x91" * 60_000 + b"\x00", "Ack: "),
    ],
)
def test_bad_bytes_are_refused_with_a_reason(payload: bytes, complaint: str) -> None:
    with pytest.raises(BadMessage, match=complaint):
        decode(payload, EVERY_TYPE)


@pytest.mark.parametrize(
    "head", [b"\x81\xa1x", b"\x82\xacwire_version\x01\xa3pid", b"\x82\xa9worker_id\x01\xa1x"]
)
@pytest.mark.parametrize("tag", [1, 7, 32])
def test_deeply_nested_fields_are_refused_like_any_other(tag: int, head: bytes) -> None:
    """Also while the wire version of a message that cannot be decoded is looked for."""
    with pytest.raises(BadMessage):
        decode(bytes([tag]) + head + b"\x91" * 20_000 + b"\xc0", EVERY_TYPE)


def test_columns_of_a_step_must_fit_together() -> None:
    with pytest.raises(BadMessage, match="StepTokens: the columns differ in length"):
        decode(encode(replace(STEP, tokens=STEP.tokens[:-4])), EVERY_TYPE)
    with pytest.raises(BadMessage, match="Cancel: dispatches: 5 bytes are no whole number of 4-byte items"):
        decode(encode(m.Cancel(coordinator=1, dispatches=b"12345")), EVERY_TYPE)


@pytest.mark.parametrize("of", [m.Prefill, m.Move, m.Handoff])
def test_what_a_message_carries_is_checked_as_well(of: type[m.Message]) -> None:
    (example,) = (example for example in EXAMPLES if type(example) is of)
    with pytest.raises(BadMessage, match=f"{of.__name__}: 4 prompt tokens in 3 tokens"):
        decode(encode(replace(example, spec=replace(SPEC, num_prompt_tokens=4))), EVERY_TYPE)
    with pytest.raises(BadMessage, match=f"{of.__name__}: spec.token_ids: 13 bytes are no whole number"):
        decode(encode(replace(example, spec=replace(SPEC, token_ids=bytes(13)))), EVERY_TYPE)


_NAN, _INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        (m.Load, "busy", [1, 0, None, "true", 1.0]),
        (m.Load, "steps", [True, 1.0, -1, 1 << 63, (1 << 64) - 1, "1", None]),
        (m.Load, "worker_id", ["", "x" * 257, b"w", 1]),
        (m.Load, "counters", [{1: 1.0}, {"a": "1"}, {"a": True}, {str(i): 1.0 for i in range(65)}, [],
                               {"x" * 5000: 1.0}]),
        (m.Joined, "dispatch", [1 << 32, -1, True]),
        (m.Joined, "transfer_s", [_NAN, _INF, -_INF, -1e-9, 1.1e9, True, "1"]),
        (m.Joined, "logprobs", [[], {}, {"logprob": None}, {"logprob": 1.0, "top_ids": [1.0]},
                                {"logprob": 1.0, "top_ids": [True]}, {"logprob": 1.0, "top_ids": [1] * 21}]),
        (m.StepTokens, "finished",
         [{"1": "stop"}, {1: "stopped"}, {1: b"stop"}, {1.0: "stop"}, {True: "stop"}]),
        (m.StepTokens, "tokens", ["x" * 256, None, [1, 2]]),
        (m.Meet, "movers", ["shm", ["shm", 1], [b"shm"], [""], ["shm"] * 17, None]),
        (m.Meet, "pid", [1 << 31, -1, "1", None]),
        (m.Hello, "pid", [1 << 31]),
        (m.Meet, "model", [None, [], {"kv_name": "f"}]),
        (m.Offer, "num_tokens", [0, (1 << 20) + 1, 3.0]),
        (m.Offer, "grammar", [bytes((256 << 10) + 1), "g", None]),
        (m.Grant, "secret", [b"s" * 15, b"s" * 17, "s" * 16]),
        (m.Flip, "role", ["both", b"prefill", None]),
    ],
)  # fmt: skip
def test_no_value_of_another_type_or_out_of_bounds_is_taken(
    kind: type[m.Message], field: str, values: list[object]
) -> None:
    (example,) = (example for example in EXAMPLES if type(example) is kind)
    for value in values:
        with pytest.raises(BadMessage, match=f"^{kind.__name__}: "):
            decode(_tag(kind) + msgspec.msgpack.encode({**_fields(example), field: value}), EVERY_TYPE)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("top_p", [0.0, 1.1, _NAN]),
        ("temperature", [-0.1, 100.5, _NAN]),
        ("presence_penalty", [-101.0, _NAN, _INF]),
        ("seed", [1 << 63, -1]),
        ("stop_token_ids", [[1] * 65, ["1"], [1.0]]),
        ("logit_bias", [dict.fromkeys(range(1025), 1.0), {"1": 1.0}]),
    ],
)
def test_sampling_is_checked_within_its_message(field: str, values: list[object]) -> None:
    fields = _fields(m.Handoff(spec=SPEC, lease=1, token=2, checksums=b""))
    for value in values:
        fields["spec"]["sampling"][field] = value
        with pytest.raises(BadMessage, match=r"^Handoff: "):
            decode(_tag(m.Handoff) + msgspec.msgpack.encode(fields), EVERY_TYPE)


def test_whole_numbers_are_taken_for_fractions_and_logprobs_may_be_anything() -> None:
    joined = m.Joined(
        coordinator=1,
        dispatch=2,
        index=0,
        token=5,
        transfer_s=3,
        logprobs=m.TokenLogprobs(logprob=-_INF, top_logprobs=(0,)),
    )
    found = decode(encode(joined), EVERY_TYPE)
    assert isinstance(found, m.Joined)
    assert found == joined
    assert isinstance(found.transfer_s, float)
    assert decode(encode(replace(joined, transfer_s=np.float64(3.0))), EVERY_TYPE) == joined


def test_half_a_character_does_not_keep_a_message_from_being_sent() -> None:
    assert decode(encode(m.Fenced(coordinator=1, reason="file \udcff")), EVERY_TYPE) == m.Fenced(
        coordinator=1, reason="file ?"
    )


def _types_within(found: Any) -> Iterator[inspect.Type]:
    yield found
    if isinstance(found, inspect.StructType):
        for field in found.fields:
            yield from _types_within(field.type)
    within = {
        inspect.Metadata: ["type"],
        inspect.DictType: ["key_type", "value_type"],
        inspect.VarTupleType: ["item_type"],
    }
    for name in within.get(type(found), []):
        yield from _types_within(getattr(found, name))
    for one in found.types if isinstance(found, inspect.UnionType) else []:
        yield from _types_within(one)


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_whatever_has_a_length_is_bounded(kind: type[m.Message]) -> None:
    known = (inspect.StructType, inspect.Metadata, inspect.UnionType, inspect.LiteralType, inspect.NoneType)
    has_length = (inspect.StrType, inspect.BytesType, inspect.DictType, inspect.VarTupleType)
    is_bounded = WIRE[_tag(kind)[0]][1].long_lists
    for found in _types_within(inspect.type_info(kind)):
        assert isinstance(found, known + has_length + (inspect.IntType, inspect.FloatType, inspect.BoolType))
        if isinstance(found, has_length):
            assert found.max_length is not None, found
        if isinstance(found, inspect.VarTupleType) and found.max_length >= LONG_LIST:
            assert is_bounded, f"{kind.__name__} has a long list"


@pytest.mark.parametrize("tag", sorted(WIRE))
def test_a_tag_alone_reserves_no_memory(tag: int) -> None:
    tracemalloc.start()
    with pytest.raises(BadMessage):
        decode(bytes([tag]), [WIRE[tag][0]])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000


def test_declared_sizes_reserve_no_memory() -> None:
    """The costliest lies: huge lists that are not there, and as many containers as fit."""
    first_token, limit = 4, 1 << 20
    lies = [
        bytes([first_token]) + b"\x81" + msgspec.msgpack.encode("prompt_logprobs") + b"\xdd\x00\x10\x00\x00",
        bytes([first_token])
        + b"\x81"
        + msgspec.msgpack.encode("prompt_logprobs")
        + b"\xdd\x00\x10\x00\x00"
        + b"\x80" * 300,
        b"\x06\x81" + msgspec.msgpack.encode("logprobs") + b"\xdf\x00\x01\x00\x00\x01",
        b"\x06\x81" + msgspec.msgpack.encode("tokens") + b"\xc6\x00\x04\x00\x00\x01",
        b"\x21\x81" + msgspec.msgpack.encode("grammar") + b"\xc6\x00\x04\x00\x00\x01",
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
    monkeypatch.setattr("splitserve.transport.messages.codec._TAGS", {m.Ack: (b"\x33", Bounds(max_bytes=4))})
    with pytest.raises(BadMessage, match="at most 4 are allowed"):
        encode(m.Ack(coordinator=1, dispatch=2, lease=3))


def test_a_step_of_64_rows_is_cheap() -> None:
    """Loose bound against accidents; the figure is about 2 us of a core."""
    best = min(_seconds_per_trip() for _ in range(20))
    assert best < 100e-6


def _seconds_per_trip() -> float:
    start = time.thread_time()
    for _ in range(50):
        decode(encode(STEP), m.FROM_WORKER)
    return (time.thread_time() - start) / 50
