"""The bytes of a data connection: parcels, each some layers of one or several blocks of a lease.

    size of the header u32 | header | body
    header: "SSKV" | version u8 | 3 bytes 0 | lease u64 | secret 16 B | offset u64 | length u64
            | positions u32 ...

little-endian. The body holds, for each position in turn, bytes [offset, offset + length) of its block. Sealed
(sealing.py), the header is one record and the body is cut into records of RECORD_BYTES, the last one shorter;
each is followed by its tag, and the size counts the tag.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ...messages.messages import SECRET_BYTES
from ..block_memory import BlockPool
from ..lease_book import ParcelHeader

_HEADER = struct.Struct(f"<4sB3xQ{SECRET_BYTES}sQQ")
_MAGIC, _VERSION = b"SSKV", 2
SIZE = struct.Struct("<I")
RECORD_BYTES = 256 << 10


def pack_header(header: ParcelHeader) -> bytes:
    fixed = _HEADER.pack(_MAGIC, _VERSION, header.lease, header.secret, header.offset, header.length)
    return fixed + struct.pack(f"<{len(header.positions)}I", *header.positions)


def header_bytes(num_positions: int) -> int:
    return _HEADER.size + 4 * num_positions


def unpack_header(data: bytes | memoryview, max_positions: int) -> ParcelHeader | None:
    """Return the header; None where ``data`` is not one of this version, or names no position or more than
    ``max_positions``."""
    size = len(data) - _HEADER.size
    if not 0 < size <= 4 * max_positions or size % 4:
        return None
    magic, version, lease, secret, offset, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or data[5:8] != b"\0\0\0":
        return None
    return ParcelHeader(
        lease, secret, offset, length, struct.unpack_from(f"<{size // 4}I", data, _HEADER.size)
    )


Span: TypeAlias = tuple[int, int]
"""[start, end) in the pool's bytes"""


def spans(pool: BlockPool, blocks: Sequence[int], offset: int, length: int) -> list[Span]:
    """Return the places of a parcel's body in ``pool``: runs of bytes, as long as possible."""
    block_bytes = pool.shape[1] * pool.shape[2]
    runs: list[Span] = []
    for block in blocks:
        start = block * block_bytes + offset
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + length)
        else:
            runs.append((start, start + length))
    return runs


def records(runs: Sequence[Span]) -> Iterator[list[Span]]:
    """Cut a body into records. Yield the runs of each."""
    record: list[Span] = []
    room = RECORD_BYTES
    for start, end in runs:
        while start < end:
            taken = min(room, end - start)
            record.append((start, start + taken))
            start, room = start + taken, room - taken
            if room == 0:
                yield record
                record, room = [], RECORD_BYTES
    if record:
        yield record
