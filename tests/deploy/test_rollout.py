"""Rollouts, decided step by step over every order of events that a cluster may have."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from splitserve.deploy.operator.rollout import Pool, Worker, flips, following, next_replicas, resized

counts = st.integers(1, 5)


@given(st.data(), counts, counts, counts, counts, st.booleans())
def test_every_rollout_ends_and_always_has_a_pair(
    data: st.DataObject, prefill: int, decode: int, old_prefill: int, old_decode: int, surge: bool
) -> None:
    """Pods start, become ready and end in any order; one that is ready may cease to be."""
    new = [Pool("prefill", "b", prefill), Pool("decode", "b", decode)]
    old = [
        Pool(name, "a", count, replicas=count, ready=count, pods=count)
        for name, count in (("prefill", old_prefill), ("decode", old_decode))
    ]
    for _ in range(200):
        wanted = next_replicas(new, old, surge)
        for pool in old:
            assert wanted[pool.key] <= pool.replicas, "an old revision never grows"
        for pool in new:
            assert pool.replicas <= wanted[pool.key] <= pool.workers
        if not any(pool.pods for pool in old) and all(pool.ready == pool.workers for pool in new):
            return
        pools = [replace(pool, replicas=wanted[pool.key]) for pool in (*new, *old)]
        moves = [moved for pool in pools for moved in _moves(pool)]
        moved = data.draw(st.sampled_from(moves))
        pools = [moved if pool.key == moved.key else pool for pool in pools]
        new, old = pools[:2], pools[2:]
        assert all(pool.ready for pool in new) or all(pool.ready for pool in old)
    raise AssertionError("it does not end")


def _moves(pool: Pool) -> list[Pool]:
    found = []
    if pool.pods < pool.replicas:
        found.append(replace(pool, pods=pool.pods + 1))
    if pool.pods > pool.replicas:
        found.append(replace(pool, pods=pool.pods - 1, ready=min(pool.ready, pool.pods - 1)))
    if pool.ready < pool.pods:
        found.append(replace(pool, ready=pool.ready + 1))
    return found


def test_the_steps_of_a_rollout() -> None:
    new = [Pool("prefill", "b", 1, 1, 1), Pool("decode", "b", 4, 1, 1)]
    old = [Pool("prefill", "a", 1, 1, 1, 1), Pool("decode", "a", 4, 4, 4, 4)]
    first = {("prefill", "b"): 1, ("decode", "b"): 2, ("prefill", "a"): 1, ("decode", "a"): 3}
    assert next_replicas(new, old, surge=True) == first
    assert next_replicas(new, old, surge=False) == first | {("decode", "a"): 2}
    ready = [replace(new[0]), replace(new[1], replicas=4, ready=4)]
    assert not any(next_replicas(ready, old, surge=True)[pool.key] for pool in old)


def test_the_revision_without_a_ready_worker_leaves_first() -> None:
    """A third revision comes before the second has replaced the first."""
    new = [Pool("decode", "c", 2)]
    old = [Pool("decode", "a", 2, 1, 1, 1), Pool("decode", "b", 2, 1, 0, 1)]
    wanted = next_replicas(new, old, surge=False)
    assert (wanted["decode", "a"], wanted["decode", "b"]) == (1, 0)


@given(st.tuples(counts, counts), st.tuples(counts, counts))
def test_only_the_total_of_flexible_pools_follows(before: tuple[int, int], wanted: tuple[int, int]) -> None:
    names = ("prefill", "decode")
    found = resized(dict(zip(names, before, strict=True)), dict(zip(names, wanted, strict=True)))
    assert sum(found.values()) == sum(wanted)
    if sum(before) == sum(wanted):
        assert tuple(found.values()) == before, "flips do it"
    changes = [found[name] - old for name, old in zip(names, before, strict=True)]
    assert all(change >= 0 for change in changes) or all(change <= 0 for change in changes)


def test_which_workers_flip() -> None:
    def worker(process: str, role: str, busy: int = 0, draining: bool = False) -> Worker:
        return Worker(process, role, draining, busy)

    workers = [
        worker("a", "prefill", 3),
        worker("b", "prefill", 1),
        worker("c", "prefill"),
        worker("d", "decode"),
    ]
    assert flips(workers, {"prefill": 1, "decode": 3}, {"a", "b"}) == [("b", "decode"), ("a", "decode")]
    assert flips(workers, {"prefill": 3, "decode": 3}, {"a", "b", "c"}) == [], (
        "those that start are waited for"
    )
    assert flips(workers, {"prefill": 0, "decode": 4}, {"c"}) == [("c", "decode")]
    leaves = [worker("a", "prefill", draining=True), worker("b", "prefill"), worker("c", "decode")]
    assert flips(leaves, {"prefill": 0, "decode": 3}, {"b"}) == [], "never the last of a role"


def test_the_pool_controllers_word_counts_only_when_all_are_there() -> None:
    bounds = {"p": ("prefill", 1, 3), "d": ("decode", 1, 4)}
    assert following({"p": 2, "d": 2}, bounds, {"prefill": 1, "decode": 9}, 4) == {"p": 1, "d": 4}
    assert following({"p": 2, "d": 2}, bounds, {"prefill": 1, "decode": 2}, 3) == {"p": 2, "d": 2}
    assert following({"p": 2, "d": 2}, bounds, {}, 4) == {"p": 2, "d": 2}
