"""A request for an adapter goes only to workers that have reported it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.adapted_bench import Adapted, routes, where
from support.lifecycle_bench import MODEL, ends, sent

from splitserve.transport.messages.messages import Goodbye, Move, Prefill


def test_a_request_goes_only_to_workers_that_have_its_adapter() -> None:
    bench = Adapted()
    bench.report("p2", "a:A")
    bench.report("d", "a:A", "b:B")
    assert where(bench, "A") == {("p2", "d")}
    prefills, decodes = map(set, zip(*where(bench), strict=True))
    assert (prefills, decodes) == ({"p", "p2"}, {"d", "d2"})  # the model itself is on all


def test_a_request_whose_adapter_all_have_goes_to_any() -> None:
    bench = Adapted("a:A")
    prefills, decodes = map(set, zip(*where(bench, "A"), strict=True))
    assert (prefills, decodes) == ({"p", "p2"}, {"d", "d2"})
    (prefill,) = sent(bench.ask("x", "A"), Prefill)
    assert prefill.spec.adapter == "A"


def test_a_report_without_adapters_changes_none_and_a_reset_without_them_forgets_all() -> None:
    bench = Adapted("a:A")
    bench.send_events("d", stored=b"x" * 16)
    assert bench.names.served == {"a": "A"}
    for name in ("d", "d2"):
        bench.send_events(name, reset=True)
    assert (bench.names.served, bench.names.absent) == ({}, {"a": "A"})


def test_a_restarted_worker_has_only_what_it_reports_anew() -> None:
    bench = Adapted()
    for name in ("p", "d"):
        bench.report(name, "a:A")
    bench.hello("d", "decode", incarnation=2)
    assert bench.names.served == {}
    bench.numbers["d"] = 0
    bench.report("d", "a:A", incarnation=2)
    assert bench.names.served == {"a": "A"}


def test_an_adapter_of_workers_that_do_not_fit_together_is_not_served() -> None:
    bench = Adapted()
    bench.hello("x", "decode", model=replace(MODEL, block_size=8))
    bench.report("p", "a:A")
    bench.report("x", "a:A")
    assert (bench.names.served, bench.names.absent) == ({}, {"a": "A"})
    (ended,) = ends(bench.ask("r", "A"))
    assert ended.error == "unavailable"
    assert "the adapter 'the-A' is on no prefill and decode worker" in ended.message


@pytest.mark.parametrize("home", ["", "prefill", "decode"])
def test_a_process_of_both_roles_serves_its_adapter_alone(home: str) -> None:
    """Two processes, mixed or of borrowers: A's blocks may not go from the one to the other."""
    bench = Adapted()
    for name in ("p", "d", "p2", "d2"):
        bench.send(name, Goodbye(worker_id=name, incarnation=1))
    for number in range(2):
        for role in ("decode", "prefill"):
            more = {"process": f"P{number}", "mixed": True, "pid": number, "home": home}
            bench.hello(f"P{number}:{role}", role, **more)
    bench.report("P0:prefill", "a:A")
    bench.report("P1:decode", "a:A")
    assert bench.names.served == {}
    bench.report("P1:prefill", "a:A")
    assert bench.names.served == {"a": "A"}
    assert routes(bench.ask("r", "A")) == [("r", "P1:prefill", "P1:decode")]


def test_a_lost_request_goes_on_where_its_adapter_is_or_waits_for_it() -> None:
    bench = Adapted()
    for name in ("p", "d", "d2"):
        bench.report(name, "a:A")
    ((_, _, first),) = routes(bench.ask("r", "A"))
    other = {"d": "d2", "d2": "d"}[first]
    assert routes(bench.die(first)) == [("r", "p", other)]
    bench.hello("d3", "decode")
    assert routes(bench.die(other)) == []  # d3 does not have it
    bench.now += 1.0
    assert routes(bench.report("d3", "a:A")) == [("r", "p", "d3")]


def test_a_running_sequence_moves_only_to_a_worker_with_its_adapter() -> None:
    bench = Adapted()
    bench.hello("d3", "decode")
    for name in ("p", "d", "d3"):
        bench.report(name, "a:A")
    for n in range(4):
        assert routes(bench.ask(f"r{n}", "A"))
    held = sorted(bench.core.pools.workers["d", 1].dispatches)
    for dispatch in held:
        bench.first(dispatch)
        bench.joined(dispatch)
    moves = sent(bench.load("d", held, draining=True), Move)
    assert len(moves) == len(held)
    assert held
    assert {move.decode.worker_id for move in moves} == {"d3"}
    assert {move.spec.adapter for move in moves} == {"A"}


def test_a_sequence_that_no_other_worker_has_the_adapter_for_stays() -> None:
    bench = Adapted()
    for name in ("p", "d"):
        bench.report(name, "a:A")
    bench.ask("r", "A")
    bench.ask("s", "A")
    bench.first(1)
    bench.joined(1)
    assert not sent(bench.load("d", [1, 2], draining=True), Move)
    assert bench.core.requests["s"].state == "prefill"  # nor is it sent away before its prompt is computed
