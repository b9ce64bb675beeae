"""What names of adapters stand for, by the reports of workers."""

from __future__ import annotations

from support.adapted_bench import Adapted

from splitserve.coordinator.lifecycle.membership import DRAINED


def test_a_name_stands_for_the_content_that_most_workers_have_and_then_for_the_newest() -> None:
    bench = Adapted("a:A")
    bench.report("p", "a:B", ":A")
    assert bench.names.served == {"a": "A"}  # no decode worker has B
    bench.report("d", "a:B", ":A")
    assert bench.names.served == {"a": "B"}  # as many, and it is newer
    bench.report("p2", "a:C")
    bench.report("d2", "a:C")
    bench.report("p", "a:A", ":B")  # two have C, one B, one A
    assert bench.names.served == {"a": "C"}
    for number in range(3):
        bench.hello(f"p{3 + number}", "prefill")
        bench.report(f"p{3 + number}", "a:D")  # three have D, and none of them decodes
    assert bench.names.served == {"a": "C"}


def test_the_models_own_names_are_no_adapters() -> None:
    bench = Adapted("base:A", "b:B")
    bench.core.pools.adapters.taken = frozenset({"base"})
    bench.report("p", "base:A", "b:B")
    bench.report("p", "base:A", "b:B", "c:C")
    assert bench.names.served == {"b": "B"}
    assert bench.core.pools.adapters.conflicts == {"base"}


def test_the_name_of_an_adapter_whose_workers_are_away_is_known_until_they_are_back() -> None:
    bench = Adapted()
    bench.report("p2", "a:A")
    bench.report("d2", "a:A")
    bench.core.pools.remove(bench.core.pools.workers["p2", 1], DRAINED)
    bench.die("d2")
    assert (bench.names.served, bench.names.absent) == ({}, {"a": "A"})
    bench.report("d")
    assert bench.names == ({}, {}, True)


def test_names_are_complete_once_every_worker_has_reported() -> None:
    bench = Adapted()
    assert bench.names.complete
    bench.hello("d3", "decode")
    assert not bench.names.complete
    bench.report("d3")
    assert bench.names.complete
