"""Names longer than a hash are a worker's own: found, evicted and counted as others, and reported nowhere."""

from __future__ import annotations

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.cache.offload import Offload
from splitserve.prefill.states import StateCache
from splitserve.transport.messages.messages import HASH_BYTES

HASH = bytes(range(HASH_BYTES))


def cached_with_snapshot(num_blocks: int = 6) -> tuple[BlockManager, list[bytes]]:
    """One block, and behind it a snapshot of two."""
    blocks = BlockManager(num_blocks)
    names = StateCache(blocks, 2, 4).names(HASH)
    taken = blocks.allocate(3) or []
    for block, name, parent in zip(taken, [HASH, *names], [None, HASH, names[0]], strict=True):
        blocks.commit(block, name, parent)
    blocks.release(taken)
    return blocks, names


def test_they_are_found_and_not_reported() -> None:
    blocks, names = cached_with_snapshot()
    assert blocks.match_prefix(names) == 2
    assert blocks.cached_hashes() == [HASH]
    assert (blocks.num_cached, blocks.num_free) == (3, 3)


def test_no_event_names_them_stored_or_removed() -> None:
    blocks = BlockManager(4)
    events = blocks.watch()
    name = HASH + b"xx"
    taken = blocks.allocate(2) or []
    blocks.commit(taken[0], HASH, None)
    blocks.commit(taken[1], name, HASH)
    assert events.take() == ([HASH], [])
    blocks.release(taken)
    assert blocks.allocate(4) is not None
    assert events.take() == ([], [HASH])


def test_the_kv_store_gets_none_of_them() -> None:
    blocks = BlockManager(6)
    offload = Offload(blocks, lambda _: False)
    taken = blocks.allocate(2) or []
    blocks.commit_all(taken, [HASH, HASH + b"xx"], None)
    blocks.release(taken)
    assert offload.take(9, idle=True)[0] == [HASH]


def test_a_snapshot_is_evicted_before_the_block_that_it_stands_behind() -> None:
    blocks, names = cached_with_snapshot()
    assert blocks.allocate(4) is not None
    assert blocks.match_prefix([HASH]) == 1
    assert blocks.match_prefix(names) == 1, "its last part first"
    assert blocks.allocate(1) is not None
    assert [blocks.match_prefix([name]) for name in (HASH, *names)] == [1, 0, 0]
