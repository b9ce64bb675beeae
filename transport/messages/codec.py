"""Messages to bytes and back: one tag byte, then the fields as a msgpack map.

Decoding checks everything, in this order: the tag is one the caller allows; the size is within that type's
bound; of a Hello or Meet, the wire version is a neighbour of ours, else nothing more is read; the msgpack is
complete and well formed, and each field is of its type (msgspec, strict) and within that type's bounds: a
list, a map or bytes are refused by the length that their header claims, before memory is reserved for them;
last, columns end with a whole item and fields fit together (``Checks``). A field that the type does not have
is skipped, and nothing is built of it: the message's size bounds its length, the interpreter's recursion
limit its depth. Where a type allows a long list (LONG_LIST entries), the decoder first skips over the message
without building anything, so that a claimed length reserves no more memory than the data that arrived. Every
failure raises ``BadMessage``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_type_hints

import msgspec

from ..errors import BadMessage
from . import messages
from .fields import ITEM_BYTES, WireVersion, is_neighbour
from .images import MAX_PIXEL_BYTES
from .messages import Message

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Bounds:
    """Bounds of one message type beyond those of its fields. ``long_lists``: a list in it may have LONG_LIST
    entries or more. ``meets``: processes meet by it, and its wire version is read before the rest."""

    max_bytes: int = 64 * KIB
    long_lists: bool = False
    meets: bool = False


LONG_LIST = 1024
_TOKENS = Bounds(max_bytes=5 * MIB)

WIRE: dict[int, tuple[type[Message], Bounds]] = {
    1: (messages.Hello, Bounds(meets=True)),
    2: (messages.Load, Bounds()),
    3: (messages.BlockEvents, Bounds(max_bytes=33 * MIB)),
    4: (messages.FirstToken, Bounds(max_bytes=32 * MIB, long_lists=True)),
    5: (messages.Joined, Bounds()),
    6: (messages.StepTokens, Bounds(max_bytes=24 * MIB)),
    7: (messages.RequestFailed, Bounds()),
    8: (messages.Goodbye, Bounds()),
    16: (messages.Welcome, Bounds()),
    17: (messages.Fenced, Bounds()),
    18: (messages.Prefill, Bounds(max_bytes=5 * MIB + MAX_PIXEL_BYTES)),
    19: (messages.Cancel, Bounds(max_bytes=MIB)),
    20: (messages.Alive, Bounds()),
    21: (messages.Move, _TOKENS),
    22: (messages.Drain, Bounds()),
    23: (messages.Flip, Bounds()),
    24: (messages.OtherVersion, Bounds()),
    25: (messages.Resume, Bounds()),
    26: (messages.SendPrefix, Bounds(max_bytes=17 * MIB)),
    # 27: a Prefill in several frames, see pixel_frames.py
    32: (messages.Meet, Bounds(meets=True)),
    33: (messages.Offer, Bounds(max_bytes=17 * MIB)),
    34: (messages.Renew, Bounds(max_bytes=MIB)),
    35: (messages.Handoff, Bounds(max_bytes=13 * MIB)),
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


class Checks:
    """Checks of one type of message, and of the messages that are its fields."""

    def __init__(self, kind: type[Message]) -> None:
        self._columns = tuple((place, attrgetter(place), item_bytes) for place, item_bytes in _columns(kind))
        self._parts = tuple(attrgetter(place) if place else _whole_message for place in _parts(kind))

    def check(self, message: Message) -> None:
        """Raise ValueError with a sentence that names the field."""
        for place, read, item_bytes in self._columns:
            if (size := len(read(message))) % item_bytes:
                raise ValueError(f"{place}: {size} bytes are no whole number of {item_bytes}-byte items")
        for part in self._parts:
            part(message).check()


def _columns(kind: type[Message]) -> Iterator[tuple[str, int]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if meta.extra:
                yield name, meta.extra[ITEM_BYTES]
    for name, within in _fields_that_are_messages(kind):
        for place, item_bytes in _columns(within):
            yield f"{name}.{place}", item_bytes


def _parts(kind: type[Message]) -> Iterator[str]:
    """Yield the places of the messages whose fields must fit together; "" is the message itself."""
    if kind.check is not Message.check:
        yield ""
    for name, within in _fields_that_are_messages(kind):
        for place in _parts(within):
            yield f"{name}.{place}".removesuffix(".")


def _whole_message(message: Message) -> Message:
    return message


def _fields_that_are_messages(kind: type[Message]) -> Iterator[tuple[str, type[Message]]]:
    for name, hint in get_type_hints(kind).items():
        if isinstance(hint, type) and issubclass(hint, Message):
            yield name, hint


_UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What the decoders raise: ValueError also for text that is not UTF-8, RecursionError for deeply nested
unknown fields."""

MAX_MESSAGE_BYTES = 1 + max(bounds.max_bytes for _, bounds in WIRE.values())

_TAGS = {kind: (bytes([tag]), bounds) for tag, (kind, bounds) in WIRE.items()}
_DECODERS = {kind: (msgspec.msgpack.Decoder(kind), Checks(kind)) for kind, _ in WIRE.values()}


_SKIPPER = msgspec.msgpack.Decoder(msgspec.Raw)
"""Raises where the payload is not one whole msgpack value; builds nothing."""


class _Versioned(msgspec.Struct):
    """What is read of a message whose other fields may mean anything."""

    wire_version: WireVersion


_VERSION_READER = msgspec.msgpack.Decoder(_Versioned)


def _plain(value: object) -> float:
    """A float of numpy's as a float."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"a message holds {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(message: Message) -> bytes:
    """The message's bytes. Raises BadMessage where its receiver would refuse it as too large."""
    tag, bounds = _TAGS[type(message)]
    try:
        payload = _ENCODER.encode(message)
    except UnicodeEncodeError:  # half a character, as in a file's name that is no UTF-8
        payload = _ENCODER.encode(_without_surrogates(message))
    if len(payload) > bounds.max_bytes:
        raise BadMessage(
            f"{type(message).__name__} of {len(payload)} bytes; at most {bounds.max_bytes} are allowed"
        )
    return tag + payload


def _without_surrogates(value: Any) -> Any:
    """Return a message, or a value within it, with a question mark for each half a character."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Message):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


def decode(
    data: bytes | memoryview,
    allowed: Collection[type[Message]],
    fill: Callable[[Message], Message] | None = None,
) -> Message:
    """The message in ``data``, which must be of one of the ``allowed`` types; OtherVersion for a Hello or
    Meet of a process that does not work together with this one. ``fill``: completes the message before its
    fields are checked together; may raise ValueError. Raises BadMessage and nothing else."""
    if not data:
        raise BadMessage("empty message")
    kind, bounds = WIRE.get(data[0], (None, None))
    if kind is None or bounds is None:
        raise BadMessage(f"unknown message tag {data[0]}")
    if kind not in allowed:
        raise BadMessage(f"{kind.__name__} is not a message for this receiver")
    if len(data) > 1 + bounds.max_bytes:
        raise BadMessage(f"{kind.__name__} of {len(data) - 1} bytes; at most {bounds.max_bytes} are allowed")
    decoder, checks = _DECODERS[kind]
    payload = data[1:]
    try:
        if bounds.meets and not is_neighbour(theirs := _VERSION_READER.decode(payload).wire_version):
            return messages.OtherVersion(wire_version=theirs)
        if bounds.long_lists:
            _SKIPPER.decode(payload)
        message = decoder.decode(payload)
        if fill is not None:
            message = fill(message)
        checks.check(message)
        return message
    except _UNDECODABLE as error:
        raise BadMessage(f"{kind.__name__}: {str(error)[:400] or type(error).__name__}") from None
