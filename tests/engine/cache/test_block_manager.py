"""The block manager under any sequence of operations: every block is free, cached or used, and every hash
that it reports is there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from splitserve.engine.cache.block_manager import BlockManager

NUM_BLOCKS = 12


def chain_of(words: list[int]) -> list[bytes]:
    """Hashes of a sequence's blocks: each names all blocks before it."""
    return [bytes(words[: i + 1]) for i in range(len(words))]


class Sequences(RuleBasedStateMachine):
    """Sequences take up cached prefixes, fill new blocks, commit them, and let go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.events, self.others = self.manager.watch(), self.manager.watch()
        self.known: set[bytes] = set()  # by the events
        self.known_to_others: set[bytes] = set()

    @rule(words=st.lists(st.integers(0, 2), min_size=1, max_size=6), commits=st.integers(0, 6))
    def start(self, words: list[int], commits: int) -> None:
        hashes = chain_of(words)
        hits = self.manager.match_prefix(hashes)
        idle = self.manager.num_idle_among(hashes[:hits])
        available = self.manager.num_available
        cached = self.manager.acquire_prefix(hashes)
        assert len(cached) == hits
        assert self.manager.num_available == available - idle
        fresh = self.manager.allocate(len(hashes) - hits)
        if fresh is None:
            assert len(hashes) - hits > available - idle
            self.manager.release(cached)
            return
        blocks = cached + fresh
        assert len(set(blocks)) == len(blocks)
        for i in range(hits, min(hits + commits, len(blocks))):
            self.manager.commit(blocks[i], hashes[i], hashes[i - 1] if i else None)
        self.held.append(blocks)

    @rule(which=st.integers(0, 100))
    def let_go(self, which: int) -> None:
        if self.held:
            self.manager.release(self.held.pop(which % len(self.held)))

    @invariant()
    def every_block_is_somewhere(self) -> None:
        m = self.manager
        assert m.num_free + m.num_cached + m.num_used == NUM_BLOCKS
        assert m.num_used == len({block for blocks in self.held for block in blocks})

    @invariant()
    def events_match_the_contents(self) -> None:
        stored, removed = self.events.take()
        assert not set(stored) & set(removed)
        self.known = (self.known | set(stored)) - set(removed)
        assert self.known == set(self.manager.cached_hashes())

    @rule()
    def others_ask_now_and_then(self) -> None:
        stored, removed = self.others.take()
        assert not set(stored) & set(removed)
        self.known_to_others = (self.known_to_others | set(stored)) - set(removed)
        assert self.known_to_others == set(self.manager.cached_hashes())

    def teardown(self) -> None:
        for blocks in self.held:
            self.manager.release(blocks)
        assert self.manager.num_used == 0


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 6), st.booleans()),
        max_size=30,
    )
)
def test_blocks_stored_together_are_as_if_one_after_the_other(
    sequences: list[tuple[list[int], int, bool]],
) -> None:
    one_by_one, together = BlockManager(NUM_BLOCKS), BlockManager(NUM_BLOCKS)
    for words, count, stays_private in sequences:
        hashes = chain_of(words)
        for manager in (one_by_one, together):
            cached = [] if stays_private else manager.acquire_prefix(hashes)
            blocks = [*cached, *(manager.allocate(len(hashes) - len(cached)) or ())]
            full = min(count, len(blocks))
            if manager is together:
                manager.commit_all(blocks[:full], hashes[:full], None)
            else:
                for i in range(full):
                    manager.commit(blocks[i], hashes[i], hashes[i - 1] if i else None)
            manager.release(blocks)
    assert vars(together) == vars(one_by_one)


@pytest.mark.parametrize("together", [False, True])
def test_a_block_that_goes_and_comes_back_between_two_looks_is_known_to_all_watchers(together: bool) -> None:
    manager = BlockManager(1)
    often, seldom, no_more = manager.watch(), manager.watch(), manager.watch()
    no_more.close()
    for reported in ([b"same"], []):
        blocks = manager.allocate(1)
        assert blocks is not None
        if together:
            manager.commit_all(blocks, [b"same"], None)
        else:
            manager.commit(blocks[0], b"same", None)
        manager.release(blocks)
        assert often.take() == (reported, [])
    assert (seldom.take(), no_more.take()) == (([b"same"], []), ([], []))


def test_leaves_go_first_and_the_oldest_of_them() -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(3)
    assert blocks is not None
    old = chain_of([1, 2, 3])
    for i, block in enumerate(blocks):
        manager.commit(block, old[i], old[i - 1] if i else None)
    manager.release(blocks)
    manager.allocate(2)  # one free, one evicted
    assert manager.match_prefix(old) == 2
    manager.allocate(1)
    assert manager.match_prefix(old) == 1


def test_a_full_pool_says_none_and_changes_nothing() -> None:
    manager = BlockManager(3)
    assert manager.allocate(2) is not None
    assert manager.allocate(2) is None
    assert manager.num_free == 1


def test_a_block_released_twice_is_our_bug() -> None:
    manager = BlockManager(2)
    blocks = manager.allocate(1)
    assert blocks is not None
    manager.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        manager.release(blocks)


def test_a_second_block_of_one_hash_stays_private() -> None:
    manager = BlockManager(3)
    blocks = manager.allocate(2)
    assert blocks is not None
    manager.commit(blocks[0], b"same", None)
    manager.commit(blocks[1], b"same", None)
    manager.release(blocks)
    assert (manager.num_cached, manager.num_free) == (1, 2)
