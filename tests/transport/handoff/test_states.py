"""The handoff of a model with states: one copy travels behind the prompt's blocks, and there is room for the
other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from support.handoff_pair import BLOCK, MODEL, TARGET, Pair, spec

from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.blocks import chain, root_hash
from splitserve.transport.messages.messages import RequestSpec

STATE = 2
WITH_STATES = replace(MODEL, state_blocks=STATE)


def pair_of(num_blocks: int = 16) -> Pair:
    return Pair(num_blocks=num_blocks, model=WITH_STATES, own=WITH_STATES)


def hand_over(pair: Pair, what: RequestSpec, num_blocks: int, is_prefix: bool = False) -> None:
    hashes = chain(root_hash("m"), what.token_ids, BLOCK)
    pair.sender.offer(TARGET, what, num_blocks, hashes, pair.now, is_prefix=is_prefix)
    pair.deliver()
    pair.sender.finish((7, what.dispatch), list(range(num_blocks)), 42, None, pair.now)
    pair.deliver()


def test_a_sequence_joins_with_its_state_and_room_for_a_second_copy() -> None:
    pair = pair_of()
    hand_over(pair, spec(1, 10), 3 + STATE)
    (join,) = pair.joined
    assert (len(join.blocks), len(join.spare)) == (3 + STATE, STATE)
    assert len({*join.blocks, *join.spare}) == 3 + 2 * STATE == pair.pool.num_used
    assert pair.puts == [0, 1, 2, 3, 4], "the spare ones are not written by the sender"


def test_where_all_full_blocks_are_cached_the_last_and_the_state_travel() -> None:
    pair = pair_of()
    hand_over(pair, spec(1, 10), 3 + STATE)
    pair.pool.release(pair.joined[0].blocks)
    pair.pool.release(pair.joined[0].spare)
    pair.puts.clear()
    hand_over(pair, spec(2, 10, "other"), 3 + STATE)
    assert pair.joined[1].num_cached_blocks == 2
    assert pair.puts == [2, 3, 4]
    assert pair.pool.num_cached == 0, "a state that has come is cached under no hash"


@pytest.mark.parametrize("missing", [0, 1])
def test_what_never_fits_with_both_copies_is_refused(missing: int) -> None:
    pair = pair_of(3 + 2 * STATE - missing)
    hand_over(pair, spec(1, 10), 3 + STATE)
    if not missing:
        assert len(pair.joined) == 1
        return
    (ended,) = pair.ended
    assert isinstance(ended, act.Undelivered)
    assert "needs 7 KV blocks; d has 6 in all" in ended.message


def test_an_offer_waits_until_there_is_room_for_both_copies() -> None:
    pair = pair_of(12)
    taken = pair.pool.allocate(12 - (3 + 2 * STATE) + 1)
    assert taken is not None
    hand_over(pair, spec(1, 10), 3 + STATE)
    assert (pair.joined, pair.pool.num_used) == ([], len(taken))
    pair.pool.release(taken[:1])
    pair.receiver.grant_waiting(pair.now)
    pair.deliver()
    assert len(pair.joined) == 1


@pytest.mark.parametrize(
    "end",
    [lambda pair: pair.sender.abandon((7, 1)), lambda pair: pair.receiver.cancel((7, 1))],
    ids=["abandoned", "cancelled"],
)
def test_a_lease_that_ends_early_frees_the_spare_copy(end: Callable[[Pair], None]) -> None:
    pair = pair_of()
    pair.sender.offer(
        TARGET, spec(1, 10), 3 + STATE, chain(root_hash("m"), spec(1, 10).token_ids, BLOCK), 0.0
    )
    pair.deliver()
    assert pair.pool.num_used == 3 + 2 * STATE
    assert sorted(block for table in pair.receiver.leases.block_tables() for block in table) == list(range(7))
    end(pair)
    pair.deliver()
    assert pair.pool.num_used == 0


def test_a_prefix_that_is_sent_carries_no_state() -> None:
    pair = pair_of(2)
    hand_over(pair, spec(1, 8), 2, is_prefix=True)
    assert pair.puts == [0, 1]
    assert (pair.joined, pair.pool.num_cached, pair.pool.num_used) == ([], 2, 0)


def test_workers_that_disagree_on_a_states_size_are_refused() -> None:
    pair = Pair(model=WITH_STATES, own=MODEL)
    hand_over(pair, spec(), 3 + STATE)
    (ended,) = pair.ended
    assert isinstance(ended, act.Undelivered)
    assert "state blocks differs" in ended.message
