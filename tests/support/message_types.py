"""Every type of message, and what decoding may do."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from splitserve.transport.errors import BadMessage
from splitserve.transport.messages import messages as m
from splitserve.transport.messages.codec import WIRE, decode

EVERY_TYPE = tuple(kind for kind, _ in WIRE.values())


def decodes_or_is_bad(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(data, EVERY_TYPE)


def _fields(message: m.Message) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return fields


def _tag(kind: type[m.Message]) -> bytes:
    return next(bytes([tag]) for tag, (other, _) in WIRE.items() if other is kind)
