"""The fields of messages: bounded types, and columns of numbers as little-endian bytes.

Rows of tokens travel as columns inside ``bytes`` fields: one message carries a whole engine step, and nothing
is boxed on the way. All fields are bounded here, before any of them is believed. Times on the wire are
*durations* in seconds; no clock is shared.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

WIRE_VERSION = 1
"""Raised by every change of the messages but a new optional field: processes of unequal versions do not work
together."""
MAX_REQUEST_TOKENS = 1 << 20
MAX_BLOCKS = 1 << 24
MAX_ROWS = 1 << 16
MAX_PARCEL_POSITIONS = 1024
HASH_BYTES = 16
SECRET_BYTES = 16
MAX_GRAMMAR_BYTES = 256 << 10
_INT63 = (1 << 63) - 1


def _column(item_bytes: int, most_items: int) -> Meta:
    """Of items one after the other. That it ends with a whole item is seen to where messages are decoded, by
    what is noted here."""
    return Meta(max_length=item_bytes * most_items, extra={ITEM_BYTES: item_bytes})


ITEM_BYTES = "item_bytes"
WireVersion = Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]
"""First in the messages by which two processes meet; one of another version is refused with a sentence
(``codec.decode``)."""
Grammar = Annotated[bytes, Meta(max_length=MAX_GRAMMAR_BYTES)]
"""As llguidance writes one; empty: any output."""
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Address = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=_INT63)]
ProcessNumber = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""Of an operating system: what it is asked of takes no larger ones."""
Incarnation = Annotated[int, Meta(ge=0, le=_INT63)]
Dispatch = Annotated[int, Meta(ge=0, lt=1 << 32)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Duration = Annotated[float, Meta(ge=0, le=1e9)]
TokenColumn = Annotated[bytes, _column(4, MAX_REQUEST_TOKENS)]
"""uint32 token ids."""
BlockColumn = Annotated[bytes, _column(4, MAX_REQUEST_TOKENS)]
"""uint32 block numbers."""
RowColumn = Annotated[bytes, _column(4, MAX_ROWS)]
HashColumn = Annotated[bytes, _column(HASH_BYTES, MAX_REQUEST_TOKENS)]
"""Block hashes, HASH_BYTES each."""
ChecksumColumn = Annotated[bytes, _column(8, MAX_REQUEST_TOKENS)]
"""uint64 checksums, one a block."""
ParcelColumn = Annotated[bytes, _column(4, MAX_PARCEL_POSITIONS)]
"""uint32 positions in a lease."""
LeaseColumn = Annotated[bytes, _column(8, MAX_ROWS)]
"""uint64 lease numbers."""


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages: immutable and closed. What is decoded has been checked against the types; what
    our own code makes is not."""

    def check(self) -> None:
        """Raises ValueError where fields that are right each do not fit together."""


def u32(values: Sequence[int] | np.ndarray) -> bytes:
    """A column of uint32, little-endian."""
    if isinstance(values, list | array) and sys.byteorder == "little":
        return array("I", values).tobytes()  # some times quicker than by way of numpy
    return np.asarray(values, dtype="<u4").tobytes()


def u64(values: list[int] | np.ndarray) -> bytes:
    """A column of uint64, little-endian."""
    if isinstance(values, list) and sys.byteorder == "little":
        return array("Q", values).tobytes()
    return np.asarray(values, dtype="<u8").tobytes()


def from_u32(column: bytes) -> list[int]:
    """The numbers of a uint32 column."""
    return u32_array(column).tolist()


def u32_array(column: bytes) -> array[int]:
    """The same in a fraction of the time and of the memory, for those who look at few of them."""
    numbers = array("I", column)
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers


def from_u64(column: bytes) -> list[int]:
    """The numbers of a uint64 column."""
    if sys.byteorder == "little":
        return array("Q", column).tolist()
    result: list[int] = np.frombuffer(column, dtype="<u8").tolist()
    return result


def from_hashes(column: bytes) -> list[bytes]:
    """The block hashes of a column."""
    return [column[i : i + HASH_BYTES] for i in range(0, len(column), HASH_BYTES)]
