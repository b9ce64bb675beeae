"""Orders workers anew for each request or session, alike in each coordinator. Pure."""

from __future__ import annotations

from hashlib import blake2b

MAX_64 = (1 << 64) - 1


def hash64(name: str) -> int:
    """Return 64 bits of a name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


def shuffled(name_hash: int, number: int) -> int:
    """Return a sort key that differs from number to number: multiplication by an odd number modulo 2^64."""
    return name_hash * (2 * number + 1) & MAX_64
