"""The fields of messages: bounded types, and columns of numbers as little-endian bytes.

Rows of tokens travel as columns inside ``bytes`` fields: one message carries a whole engine step, and nothing is boxed
on the way. All fields are bounded here, before any of them is believed. Times on the wire are *durations* in seconds; no clock is shared.
"""

from __future__ import annotations

import sys
from array import array
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_REQUEST_TOKENS = 1 << 20
MAX_BLOCKS = 1 << 24
MAX_ROWS = 1 << 16
MAX_PARCEL_POSITIONS = 1024
HASH_BYTES = 16
SECRET_BYTES = 16
MAX_GRAMMAR_BYTES = 256 << 10


def _whole(item_bytes: int) -> AfterValidator:
    """Refuses a column that ends in the middle of an item."""

    def check(column: bytes) -> bytes:
        if len(column) % item_bytes:
            raise ValueError(f"{len(column)} bytes are no whole number of {item_bytes}-byte items")
        return column

    return AfterValidator(check)


Grammar = Annotated[bytes, Field(max_length=MAX_GRAMMAR_BYTES)]
"""As llguidance writes one; empty: any output."""
Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
Address = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Incarnation = Annotated[int, Field(ge=0, lt=1 << 63)]
Dispatch = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Duration = Annotated[float, Field(ge=0, le=1e9)]
TokenColumn = Annotated[bytes, Field(max_length=4 * MAX_REQUEST_TOKENS), _whole(4)]
"""uint32 token ids."""
BlockColumn = Annotated[bytes, Field(max_length=4 * MAX_REQUEST_TOKENS), _whole(4)]
"""uint32 block numbers."""
RowColumn = Annotated[bytes, Field(max_length=4 * MAX_ROWS), _whole(4)]
HashColumn = Annotated[bytes, Field(max_length=HASH_BYTES * MAX_REQUEST_TOKENS), _whole(HASH_BYTES)]
"""Block hashes, HASH_BYTES each."""
ChecksumColumn = Annotated[bytes, Field(max_length=8 * MAX_REQUEST_TOKENS), _whole(8)]
"""uint64 checksums, one a block."""
ParcelColumn = Annotated[bytes, Field(max_length=4 * MAX_PARCEL_POSITIONS), _whole(4)]
"""uint32 positions in a lease."""
LeaseColumn = Annotated[bytes, Field(max_length=8 * MAX_ROWS), _whole(8)]
"""uint64 lease numbers."""


class Message(BaseModel):
    """Base of all messages: immutable, closed, strictly typed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def u32(values: list[int] | np.ndarray) -> bytes:
    """A column of uint32, little-endian."""
    if isinstance(values, list) and sys.byteorder == "little":
        return array("I", values).tobytes()  # some times quicker than by way of numpy
    return np.asarray(values, dtype="<u4").tobytes()


def u64(values: list[int] | np.ndarray) -> bytes:
    """A column of uint64, little-endian."""
    if isinstance(values, list) and sys.byteorder == "little":
        return array("Q", values).tobytes()
    return np.asarray(values, dtype="<u8").tobytes()


def from_u32(column: bytes) -> list[int]:
    """The numbers of a uint32 column."""
    if sys.byteorder == "little":
        return array("I", column).tolist()
    result: list[int] = np.frombuffer(column, dtype="<u4").tolist()
    return result


def from_u64(column: bytes) -> list[int]:
    """The numbers of a uint64 column."""
    if sys.byteorder == "little":
        return array("Q", column).tolist()
    result: list[int] = np.frombuffer(column, dtype="<u8").tolist()
    return result


def from_hashes(column: bytes) -> list[bytes]:
    """The block hashes of a column."""
    return [column[i : i + HASH_BYTES] for i in range(0, len(column), HASH_BYTES)]
