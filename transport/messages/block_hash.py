"""The hash that names a KV block on every worker, chained over all tokens before it.

    hash[0]   = blake2b_16(root, tokens[0 : block_size])
    hash[i]   = blake2b_16(hash[i - 1], tokens[i * block_size : (i + 1) * block_size])
    root      = blake2b_16(model fingerprint, salt)

Tokens enter as little-endian uint32. BLAKE2b is collision-resistant, so that no tenant can craft a prompt
that hits another's block; the salt separates tenants on purpose. About 1 us a block.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from .messages import HASH_BYTES


@lru_cache(maxsize=1024)  # of a few models and tenants
def root_hash(fingerprint: str, salt: bytes = b"") -> bytes:
    """The parent of a sequence's first block."""
    name = fingerprint.encode()
    return blake2b(len(name).to_bytes(4, "little") + name + salt, digest_size=HASH_BYTES).digest()


def chain(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Hashes of the *full* blocks of ``token_ids`` (a uint32 column), given the hash of the block before
    them."""
    size = 4 * block_size
    hashes = []
    for start in range(0, len(token_ids) - size + 1, size):
        parent = blake2b(parent + token_ids[start : start + size], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
