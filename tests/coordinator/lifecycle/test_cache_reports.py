"""Routing knows a worker's prefix cache by numbered reports: each counts once, after a whole one."""

from __future__ import annotations

from support.lifecycle_bench import Bench

from splitserve.transport.messages.messages import BlockEvents

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


class Reported(Bench):
    def report(
        self,
        number: int,
        stored: bytes = b"",
        removed: bytes = b"",
        reset: bool = False,
        incarnation: int = 1,
    ) -> None:
        events = BlockEvents(
            worker_id="p", incarnation=incarnation, number=number, reset=reset, stored=stored, removed=removed
        )
        self.core.receive(("p", 1), events, self.now)

    @property
    def cached(self) -> set[bytes]:
        pools = self.core.pools
        cached = pools.workers["p", 1].cached
        assert {block for block in (A, B, C) if block in pools.cache} == cached
        return cached


def test_changes_count_in_their_order() -> None:
    bench = Reported()
    bench.report(1, stored=A + B, reset=True)
    bench.report(2, stored=C, removed=A)
    assert bench.cached == {B, C}


def test_an_old_report_and_one_after_a_gap_change_nothing() -> None:
    bench = Reported()
    bench.report(1, stored=A, reset=True)
    bench.report(2, stored=B)
    bench.report(2, removed=B)
    bench.report(1, stored=C, reset=True)
    bench.report(4, stored=C)
    bench.report(3, stored=C, incarnation=2)  # of no worker that is here
    assert bench.cached == {A, B}


def test_a_whole_report_replaces_what_was_known_also_after_a_gap() -> None:
    bench = Reported()
    bench.report(1, stored=A, reset=True)
    bench.report(5, stored=B, reset=True)
    assert bench.cached == {B}
    bench.report(6, stored=C)
    assert bench.cached == {B, C}


def test_a_worker_that_is_started_again_has_nothing_cached() -> None:
    bench = Reported()
    bench.report(1, stored=A, reset=True)
    bench.hello("p", "prefill", incarnation=2)
    assert A not in bench.core.pools.cache
