"""What is kept of the workers' room and rank, however they change, against what is worked out anew from their
state."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.lifecycle_bench import MODEL, make_hello

from splitserve.coordinator.lifecycle.cache_index import MAX_LEVELS
from splitserve.coordinator.lifecycle.limits import LifecycleLimits
from splitserve.coordinator.lifecycle.open_workers import FEW_HOLDERS, MAX_COMPARED
from splitserve.coordinator.lifecycle.pools import Pools
from splitserve.coordinator.lifecycle.routing import Need, choose_decode, choose_prefill
from splitserve.coordinator.lifecycle.worker import WorkerRecord
from splitserve.transport.messages.messages import Load, Role

HASHES = [bytes([i]) * 16 for i in range(4)]
ROLES: tuple[Role, ...] = ("prefill", "decode")
LENGTHS = st.integers(1, 90)
PLACES = st.integers(0, 1 << 16)
"""The place of a worker among the present ones."""


def has_room(worker: WorkerRecord, num_tokens: int) -> bool:
    """For a new sequence: the rule, plainly."""
    if worker.role == "prefill":
        ahead = sum(pending for pending in worker.pending.values() if pending <= num_tokens)
        takes = worker.accepting or not worker.dispatches
        return takes and (ahead == 0 or ahead + num_tokens <= worker.queued_batches * worker.max_batch_tokens)
    num_rows = len(worker.dispatches) + worker.num_others
    num_blocks = worker.blocks_reported - worker.pending_blocks
    return num_rows == 0 or (num_rows < worker.max_num_seqs and num_blocks > worker.blocks_for(num_tokens))


class Rooms(RuleBasedStateMachine):
    """Workers come, are given work, report and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = Pools(LifecycleLimits())
        self.num_come = self.num_dispatched = 0

    @initialize()
    def some_are_here(self) -> None:
        for role in ROLES * 2:
            self.comes(role, 8, 40)

    @rule(role=st.sampled_from(ROLES), max_num_seqs=st.integers(1, 8), num_blocks=st.integers(1, 60))
    def comes(self, role: Role, max_num_seqs: int, num_blocks: int) -> None:
        self.num_come += 1
        sizes = {"max_num_seqs": max_num_seqs, "num_blocks": num_blocks, "max_batch_tokens": 32}
        self.pools.add(make_hello(f"w{self.num_come}", role, **sizes), 0.0)

    @rule(place=PLACES)
    def is_gone(self, place: int) -> None:
        self.pools.remove(self.one(place), "gone")

    @rule(place=PLACES)
    def leaves(self, place: int) -> None:
        self.pools.close(self.one(place), None)

    @rule(place=PLACES, num_tokens=LENGTHS)
    def is_given_work(self, place: int, num_tokens: int) -> None:
        self.num_dispatched += 1
        worker = self.one(place)
        if worker.role == "prefill":
            worker.reserve_prompt(self.num_dispatched, num_tokens)
        else:
            worker.reserve_sequence(self.num_dispatched, worker.blocks_for(num_tokens))

    @rule(place=PLACES)
    def has_computed_or_joined(self, place: int) -> None:
        worker = self.one(place)
        if worker.pending:
            worker.release_prompt(min(worker.pending))
        worker.release_blocks(worker.pending_blocks // 2)

    @rule(place=PLACES)
    def has_ended_one(self, place: int) -> None:
        worker = self.one(place)
        if worker.dispatches:
            dispatch = max(worker.dispatches)
            worker.release_prompt(dispatch)
            worker.release(dispatch)

    @rule(
        place=PLACES,
        free=st.integers(0, 40),
        cached=st.integers(0, 20),
        accepting=st.booleans(),
        others=st.integers(0, 3),
    )
    def reports(self, place: int, free: int, cached: int, accepting: bool, others: int) -> None:
        worker = self.one(place)
        message: dict[str, Any] = dict.fromkeys(
            ("blocks_used", "blocks_leased", "num_running", "num_waiting", "num_waiting_tokens", "steps"), 0
        )
        message |= {"blocks_free": free, "blocks_cached": cached, "accepting": accepting, "busy": False}
        load = Load(
            worker_id=worker.id[0], incarnation=1, num_others=others, num_others_tokens=8 * others, **message
        )
        self.pools.report(load, 0.0)

    @rule(place=PLACES, num_cached=st.integers(0, 4))
    def caches(self, place: int, num_cached: int) -> None:
        worker = self.one(place)
        self.pools.cache.store(worker, HASHES[:num_cached])
        self.pools.cache.remove(worker, reversed(HASHES[num_cached:]))

    @rule(
        num_tokens=LENGTHS,
        session=st.sampled_from(["", "a", "b"]),
        turn=st.integers(0, 9),
        caches=st.booleans(),
    )
    def the_best_of_few_is_the_best_of_all(
        self, num_tokens: int, session: str, turn: int, caches: bool
    ) -> None:
        hashes = HASHES[: num_tokens // MODEL.block_size] if caches else []
        need = Need(num_tokens, hashes[0] if hashes else None, lambda: hashes, session, turn)
        for role, choose in (("prefill", choose_prefill), ("decode", choose_decode)):
            workers = self.pools.open_of_role(role)
            able = [w for w in self.open(role) if has_room(w, num_tokens)]
            assert workers.has_room(num_tokens) == bool(able)
            assert workers.with_room(num_tokens) == able
            few = workers.best(num_tokens, turn, None)
            some = workers.best(num_tokens, turn, 2)
            assert len(some) == min(2, len(few))
            assert set(some) <= set(few)
            assert bool(few) == bool(able)
            if able:
                for level in self.pools.cache.levels(hashes):
                    few += [w for w in workers.best(num_tokens, turn, None, level) if w not in few]
                assert choose("hybrid", few, need) is choose("hybrid", able, need)

    @invariant()
    def every_holder_is_known(self) -> None:
        workers = self.pools.workers.values()
        known = {h: {w.id for w in workers if h in w.cached} for h in HASHES}
        assert {h: {w.id for w in self.pools.cache.holders(h)} for h in HASHES} == known

    @invariant()
    def what_is_kept_is_what_is(self) -> None:
        for role in ROLES:
            workers = self.pools.open_of_role(role)
            assert list(workers) == self.open(role)
            assert workers.max_room >= max((w.room for w in workers), default=-1)
            if role == "prefill":
                assert workers.sum_of_ranks == sum(w.pending_tokens for w in workers)
            for worker in workers:
                assert all(
                    (num_tokens <= worker.room) == has_room(worker, num_tokens)
                    for num_tokens in range(1, 100)
                )

    def open(self, role: Role) -> list[WorkerRecord]:
        return [w for w in self.pools.of_role(role) if not w.draining]

    def one(self, place: int) -> WorkerRecord:
        workers = list(self.pools.workers.values())
        assume(workers)
        return workers[place % len(workers)]


def test_of_many_that_are_equal_each_has_its_turn() -> None:
    pools = Pools(LifecycleLimits())
    for number in range(300):
        pools.add(make_hello(f"d{number}", "decode", max_num_seqs=8, num_blocks=40, max_batch_tokens=32), 0.0)
    workers = pools.open_of_role("decode")
    times = Counter(worker.number for turn in range(3000) for worker in workers.best(20, turn))
    assert len(times) == 300
    assert sum(times.values()) == 3000 * MAX_COMPARED
    assert max(times.values()) < 1.5 * min(times.values())


@pytest.mark.parametrize("num_holders", [FEW_HOLDERS, 300])
def test_of_many_with_the_prompt_cached_few_are_compared(num_holders: int) -> None:
    pools = Pools(LifecycleLimits())
    for number in range(300):
        pools.add(make_hello(f"p{number}", "prefill", max_batch_tokens=32), 0.0)
    workers = pools.open_of_role("prefill")
    for worker in list(workers)[:num_holders]:
        pools.cache.store(worker, HASHES)
    (level,) = pools.cache.levels(HASHES)
    times = Counter(worker.number for turn in range(3000) for worker in workers.best(64, turn, level=level))
    assert set(times) == set(range(1, num_holders + 1))
    assert sum(times.values()) == 3000 * MAX_COMPARED


def test_a_sessions_own_worker_is_among_few() -> None:
    pools = Pools(LifecycleLimits())
    for number in range(300):
        pools.add(make_hello(f"p{number}", "prefill", max_batch_tokens=32), 0.0)
    workers = pools.open_of_role("prefill")
    for session in ("a", "b", "c"):
        need = Need(20, None, list, session, 0)
        own = choose_prefill("hybrid", list(workers), need)
        assert {choose_prefill("hybrid", workers.best(20, t, session=session), need) for t in range(9)} == {
            own
        }


def test_a_prompt_that_workers_have_to_many_depths_has_few_levels() -> None:
    pools, hashes = Pools(LifecycleLimits()), [bytes([i]) * 16 for i in range(200)]
    for number in range(200):
        pools.add(make_hello(f"p{number}", "prefill"), 0.0)
    for worker in pools.workers.values():
        pools.cache.store(worker, hashes[: worker.number])
    levels = pools.cache.levels(hashes)
    assert 1 < len(levels) <= MAX_LEVELS
    assert levels[0].block_hash == hashes[-1]
    assert [len(level.holders) for level in levels] == sorted(len(level.holders) for level in levels)


TestRooms = Rooms.TestCase
TestRooms.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
