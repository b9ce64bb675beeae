"""What travels with the ``zmq`` mover: a header frame, and one frame with some layers of one or several blocks of a lease.

    magic "SSKV" | version u8 | 3 bytes 0 | lease u64 | secret 16 B | offset u64 | length u64 | positions u32 ...

little-endian. The body holds, for each position in turn, bytes [offset, offset + length) of its block.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..messages import SECRET_BYTES

_HEADER = struct.Struct(f"<4sB3xQ{SECRET_BYTES}sQQ")
_MAGIC, _VERSION = b"SSKV", 1


@dataclass(frozen=True, slots=True)
class ParcelHeader:
    lease: int
    secret: bytes
    offset: int
    length: int
    positions: tuple[int, ...]


def pack_header(header: ParcelHeader) -> bytes:
    fixed = _HEADER.pack(_MAGIC, _VERSION, header.lease, header.secret, header.offset, header.length)
    return fixed + struct.pack(f"<{len(header.positions)}I", *header.positions)


def unpack_header(data: bytes, max_positions: int) -> ParcelHeader | None:
    """None where ``data`` is no header of this version, or names no position or more than ``max_positions``."""
    size = len(data) - _HEADER.size
    if not 0 < size <= 4 * max_positions or size % 4:
        return None
    magic, version, lease, secret, offset, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        return None
    return ParcelHeader(lease, secret, offset, length, struct.unpack_from(f"<{size // 4}I", data, _HEADER.size))


PARCEL_BYTES = 2 << 20
HIGH_WATER_MARK = 16  # parcels per connection and direction
USER_NAME = b"put"


def slices_per_parcel(slice_bytes: int) -> int:
    """How many blocks one parcel may hold, of each of which it carries ``slice_bytes``."""
    return max(1, PARCEL_BYTES // slice_bytes)


def join_data_address(address: str, password: str) -> str:
    """What the peer needs to connect, in one string that travels over the encrypted control channel only."""
    return f"{address}#{password}"


def split_data_address(data_address: str) -> tuple[str, str]:
    """(address, password)"""
    address, _, password = data_address.partition("#")
    return address, password
