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
    """One that spares the computation of as many blocks as it takes; at a branch and before a prompt's last
    token, of a fourth of them."""
    hashes = [bytes([i]) * HASH_BYTES for i in range(20)]
    blocks = BlockManager(64)
    cache = StateCache(blocks, 8, 4)

    def marks(*chunks: tuple[int, int], branch: int = 0) -> list[int]:
        states, found = cache.begin([], 0), []
        states.branch = branch
        for start, end in chunks:
            is_last = (start, end) == chunks[-1]
            chunk = cache.of_chunk(states, 0, start, end, hashes, 0, is_last)
            assert chunk is not None
            cache.book(states, chunk, hashes[: (start + chunk.mark) // 4], is_last)
            found.append(chunk.mark)
        cache.free(states)
        return found

    assert marks((0, 7)) == [0]
    assert marks((0, 30), (30, 35), (35, 44)) == [0, 2, 5]
    assert marks((0, 8)) == [0]
    assert marks((0, 12), (12, 14), branch=12) == [12, 0]
    kept = {i for i, of in enumerate(hashes) if blocks.match_prefix(cache.hashes(of)) == 8}
    assert kept == {2, 7, 9}
    assert blocks.num_used == 0


@pytest.mark.parametrize(("num_cached", "branch"), [(1, 0), (2, 8)])
def test_a_branch_is_where_a_snapshot_spares_enough(num_cached: int, branch: int) -> None:
    assert StateCache(BlockManager(16), 8, 4).begin(BLOCKS[:num_cached], 0).branch == branch
