"""Which cached blocks are written to the KV store: each once, before it is evicted."""

from __future__ import annotations

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.cache.offload import Offload

HASHES = [bytes([i]) * 16 for i in range(16)]


def cache(num_blocks: int, num_cached: int, *stored: bytes) -> tuple[BlockManager, Offload]:
    blocks = BlockManager(num_blocks)
    offload = Offload(blocks, stored.__contains__)
    taken = blocks.allocate(num_cached) or []
    blocks.commit_all(taken, HASHES[:num_cached], None)
    blocks.release(taken)
    return blocks, offload


def test_blocks_are_written_before_a_cache_is_full_the_oldest_first() -> None:
    blocks, offload = cache(16, 8)
    assert offload.take(4, idle=False) == ([], [])
    used = blocks.allocate(4)
    assert used is not None
    hashes, numbers = offload.take(3, idle=False)
    assert hashes == HASHES[:3]
    assert numbers == blocks.find(HASHES[:3])
    assert offload.take(9, idle=False)[0] == HASHES[3:8]
    assert offload.take(9, idle=False) == ([], [])


def test_an_idle_worker_writes_all() -> None:
    _, offload = cache(16, 8)
    assert offload.take(16, idle=True)[0] == HASHES[:8]


def test_what_has_been_evicted_is_not_written() -> None:
    blocks, offload = cache(16, 8)
    assert blocks.allocate(11) is not None, "evicts three"
    assert len(offload.take(16, idle=False)[0]) == 5


def test_what_comes_again_is_written_again() -> None:
    blocks, offload = cache(16, 2)
    assert offload.take(16, idle=True)[0] == HASHES[:2]
    assert blocks.allocate(16) is not None
    assert offload.take(16, idle=True) == ([], [])
    again = [0]
    blocks.commit_all(again, HASHES[:1], None)
    assert offload.take(16, idle=True) == (HASHES[:1], again)


def test_what_is_known_to_be_stored_is_not_written() -> None:
    _, offload = cache(16, 8, *HASHES[1:7])
    assert offload.take(2, idle=True)[0] == [HASHES[0], HASHES[7]]
    assert offload.take(2, idle=True) == ([], [])
