"""Messages to bytes and back: one tag byte, then the fields as a msgpack map.

Decoding believes nothing before it is checked, in this order: the tag is one the caller allows; the size is within that
type's bound; the msgpack is complete and well formed (skipped over once without building anything, so that a length in a
header can never make us reserve more than what really arrived; what is as small as SMALL_BYTES cannot reserve much); no
string, map, list or count of containers exceeds the type's bound; the fields satisfy the type (pydantic, strict). Whatever
fails raises ``BadMessage``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgpack
from pydantic import ValidationError

from . import messages
from .errors import BadMessage
from .messages import MAX_ROWS, Message

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Bounds:
    """What one message type may hold. Containers are maps and lists, nested ones included."""

    max_bytes: int = 64 * KIB
    max_length: int = 64  # entries of one map or list
    max_containers: int = 8


_TOKENS = Bounds(max_bytes=5 * MIB, max_length=1024, max_containers=8)

WIRE: dict[int, tuple[type[Message], Bounds]] = {
    1: (messages.Hello, Bounds()),
    2: (messages.Load, Bounds()),
    3: (messages.BlockEvents, Bounds(max_bytes=33 * MIB)),
    4: (messages.FirstToken, Bounds(max_bytes=32 * MIB, max_length=1 << 20, max_containers=3 << 20)),
    5: (messages.Joined, Bounds()),
    6: (messages.StepTokens, Bounds(max_bytes=24 * MIB, max_length=MAX_ROWS, max_containers=4 * MAX_ROWS)),
    7: (messages.RequestFailed, Bounds()),
    8: (messages.Goodbye, Bounds()),
    16: (messages.Welcome, Bounds()),
    17: (messages.Fenced, Bounds()),
    18: (messages.Prefill, _TOKENS),
    19: (messages.Cancel, Bounds(max_bytes=MIB)),
    20: (messages.Alive, Bounds()),
    21: (messages.Move, _TOKENS),
    22: (messages.Drain, Bounds()),
    23: (messages.Flip, Bounds()),
    32: (messages.Meet, Bounds()),
    33: (messages.Offer, Bounds(max_bytes=17 * MIB)),
    34: (messages.Renew, Bounds(max_bytes=MIB)),
    35: (messages.Handoff, Bounds(max_bytes=13 * MIB, max_length=1024)),
    36: (messages.Release, Bounds()),
    37: (messages.Placed, Bounds(max_bytes=9 * MIB)),
    38: (messages.ParcelComing, Bounds()),
    39: (messages.RendezvousEntry, Bounds()),
    40: (messages.SessionOver, Bounds()),
    41: (messages.Retire, Bounds()),
    48: (messages.Met, Bounds()),
    49: (messages.Grant, Bounds(max_bytes=5 * MIB)),
    50: (messages.Refuse, Bounds()),
    51: (messages.Ack, Bounds()),
    52: (messages.Nack, Bounds(max_bytes=5 * MIB)),
    53: (messages.Revoke, Bounds()),
    54: (messages.Retired, Bounds()),
}
"""Tags are part of the wire: a number is never given to another type."""

MAX_MESSAGE_BYTES = 1 + max(bounds.max_bytes for _, bounds in WIRE.values())
MAX_TEXT_BYTES = 16 * KIB
SMALL_BYTES = 256

_TAGS = {kind: (bytes([tag]), bounds) for tag, (kind, bounds) in WIRE.items()}


def encode(message: Message) -> bytes:
    """The message's bytes. Raises BadMessage where its receiver would refuse it as too large."""
    tag, bounds = _TAGS[type(message)]
    payload: bytes = msgpack.packb(message.__dict__, default=_fields_of, unicode_errors="replace")
    if len(payload) > bounds.max_bytes:
        raise BadMessage(f"{type(message).__name__} of {len(payload)} bytes; at most {bounds.max_bytes} are allowed")
    return tag + payload


def _fields_of(part: Message) -> dict[str, Any]:
    """Of a message within a message."""
    return part.__dict__


def decode(data: bytes | memoryview, allowed: Collection[type[Message]]) -> Message:
    """The message in ``data``, which must be of one of the ``allowed`` types. Raises BadMessage and nothing else."""
    if not data:
        raise BadMessage("empty message")
    kind, bounds = WIRE.get(data[0], (None, None))
    if kind is None or bounds is None:
        raise BadMessage(f"unknown message tag {data[0]}")
    if kind not in allowed:
        raise BadMessage(f"{kind.__name__} is not a message for this receiver")
    if len(data) > 1 + bounds.max_bytes:
        raise BadMessage(f"{kind.__name__} of {len(data) - 1} bytes; at most {bounds.max_bytes} are allowed")
    fields = _unpack(data[1:], kind, bounds)
    try:
        message: Message = kind.__pydantic_validator__.validate_python(fields)
        return message
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadMessage(f"{kind.__name__}: {place[:200] or 'message'}: {first['msg'][:200]}") from None


def _unpack(payload: bytes | memoryview, kind: type[Message], bounds: Bounds) -> Any:
    """The payload as plain Python values, none larger than ``bounds`` says."""
    remaining = bounds.max_containers
    most = min(bounds.max_length, len(payload))  # each entry is a byte at least

    def count(container: Any) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise ValueError(f"more than {bounds.max_containers} containers")
        return container

    try:
        if len(payload) > SMALL_BYTES:
            scan = msgpack.Unpacker(max_buffer_size=bounds.max_bytes, read_size=len(payload))  # by default it reserves 1 MiB
            scan.feed(payload)
            scan.skip()
        return msgpack.unpackb(
            payload,
            object_hook=count,
            list_hook=count,
            strict_map_key=False,  # rows are int keys
            max_str_len=MAX_TEXT_BYTES,
            max_array_len=most,
            max_map_len=most,
            max_ext_len=0,
        )
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError, RecursionError) as error:
        # ValueError: malformed, too long or too deep; TypeError: an unhashable map key.
        raise BadMessage(f"{kind.__name__}: {str(error)[:200] or type(error).__name__}") from None
