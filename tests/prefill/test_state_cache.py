"""Snapshots in a worker's cache: evicted before the block that they stand behind, and sent along with it."""

from __future__ import annotations

import pytest

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.prefill.states import StateCache
from splitserve.transport.messages.blocks import state_hashes
from splitserve.transport.messages.messages import HASH_BYTES

BLOCKS = [bytes([i]) * HASH_BYTES for i in range(5)]
STATE = 2


def cached(*behind: int) -> tuple[BlockManager, StateCache]:
    """All of BLOCKS, and snapshots behind these of them."""
    blocks = BlockManager(len(BLOCKS) + STATE * len(behind))
    for hashes, parent in [(BLOCKS, None), *((state_hashes(BLOCKS[i], STATE), BLOCKS[i]) for i in behind)]:
        taken = blocks.allocate(len(hashes)) or []
        blocks.commit_all(taken, hashes, parent)
        blocks.release(taken)
    return blocks, StateCache(blocks, STATE, 4)


def test_a_snapshot_is_evicted_before_its_block() -> None:
    blocks, states = cached(4)
    for left in (1, 0):
        assert blocks.allocate(1) is not None
        assert blocks.match_prefix(states.hashes(BLOCKS[4])) == left, "its last block first"
        assert blocks.match_prefix(BLOCKS) == 5
        assert states.match(BLOCKS) == 0
    assert blocks.allocate(1) is not None
    assert blocks.match_prefix(BLOCKS) == 4


@pytest.mark.parametrize(("behind", "count"), [((), 0), ((1,), 2), ((1, 3), 4), ((1, 4), 2)])
def test_another_worker_gets_what_it_can_go_on_behind(behind: tuple[int, ...], count: int) -> None:
    """It has asked for the first four blocks."""
    _, states = cached(*behind)
    sent = states.with_snapshot(BLOCKS[:4])
    assert sent == [*BLOCKS[:count], *(states.hashes(BLOCKS[count - 1]) if count else [])]


def test_without_states_all_blocks_are_of_use() -> None:
    blocks, _ = cached()
    assert StateCache(blocks, 0, 4).with_snapshot(BLOCKS) == BLOCKS


def test_hashes_of_states_are_like_others() -> None:
    hashes = [of for block in BLOCKS for of in state_hashes(block, 300)]
    assert len({*hashes, *BLOCKS}) == len(hashes) + len(BLOCKS)
    assert {len(of) for of in hashes} == {HASH_BYTES}
    assert state_hashes(BLOCKS[0], 2) == state_hashes(BLOCKS[0], 300)[:2]


def test_a_snapshot_is_left_where_it_spares_enough() -> None:
    """A fourth of its own blocks: two of tokens here."""
    blocks = BlockManager(64)
    cache = StateCache(blocks, 8, 4)
    states = cache.begin([], 0)
    marks = []
    for start, end in ((0, 5), (5, 9), (9, 13), (13, 22)):
        chunk = cache.of_chunk(states, 0, start, end, BLOCKS, 0)
        assert chunk is not None
        cache.book(states, chunk, BLOCKS[: end // 4])
        marks.append(chunk.mark)
    assert marks == [0, 3, 0, 7]
    assert [i for i, block in enumerate(BLOCKS) if blocks.match_prefix(cache.hashes(block)) == 8] == [1, 4]
    cache.free(states)
    for num_cached, branch in ((3, 0), (4, 16)):
        states = cache.begin(BLOCKS[:num_cached], 2)
        assert states.branch == branch
        cache.free(states)
