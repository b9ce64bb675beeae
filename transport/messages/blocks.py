"""A sequence's KV blocks, as every worker and the coordinator compute them: their hashes, and which of them a
sliding window has left behind. Pure.

**Hashes.** A block's hash names it on every worker; it is chained over all tokens before the block.

    hash[0]   = blake2b_16(root, tokens[0 : block_size])
    hash[i]   = blake2b_16(hash[i - 1], tokens[i * block_size : (i + 1) * block_size])
    root      = blake2b_16(KV name, adapter, salt), each after its length

Tokens enter as little-endian uint32. BLAKE2b is collision-resistant, so that no tenant can craft a prompt
that hits another's block; the salt separates tenants on purpose. About 1 us a block.

**States.** The state of all tokens up to a block's end, of layers without keys and values, lies in blocks of
its own. Their hashes follow from that block's.

**Sliding window.** A token at position p attends to positions p - window + 1 to p. A block whose last
position is below that is behind the window of this token and of every later one: it may be released, and need
not be sent. Its place in the sequence's block table stays, as ``NO_BLOCK``.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from .messages import HASH_BYTES

NO_BLOCK = -1
_STATE = int.from_bytes(blake2b(b"state", digest_size=HASH_BYTES).digest(), "little")


@lru_cache(maxsize=1024)  # a few models and tenants
def root_hash(kv_name: str, salt: bytes = b"", adapter: str = "") -> bytes:
    """Return the parent of a sequence's first block. ``adapter``: its content's name; empty: none."""
    fields = (kv_name.encode(), adapter.encode(), salt)
    tagged = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return blake2b(tagged, digest_size=HASH_BYTES).digest()


def chain(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Return the hashes of the *full* blocks of ``token_ids`` (a uint32 column), given the hash of the block
    before them."""
    size = 4 * block_size
    hashes = []
    for start in range(0, len(token_ids) - size + 1, size):
        parent = blake2b(parent + token_ids[start : start + size], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def state_hashes(block_hash: bytes, count: int) -> list[bytes]:
    """Return the hashes of the blocks with the state behind this block. They differ from it by fixed numbers:
    to craft two blocks that do is as hard as two that are equal."""
    number = int.from_bytes(block_hash, "little") ^ _STATE
    return [(number ^ i).to_bytes(HASH_BYTES, "little") for i in range(count)]


def num_behind(num_tokens: int, window: int, block_size: int) -> int:
    """Return how many leading blocks no token from position ``num_tokens`` on attends to. ``window``: in
    tokens, the widest of all layers; 0: some layer attends to all tokens."""
    return max(0, num_tokens - window + 1) // block_size if window else 0


def held(blocks: list[int]) -> list[int]:
    """Return the blocks of a table that are still held."""
    return blocks[blocks.count(NO_BLOCK) :] if blocks and blocks[0] == NO_BLOCK else blocks
