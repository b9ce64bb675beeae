"""A request for an adapter goes only to workers that have reported it, holds up no other, and always ends."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace
from support.lifecycle_bench import MODEL, Bench, ends, sent

from splitserve.coordinator.lifecycle.actions import Action, End, Send
from splitserve.coordinator.lifecycle.adapters import AdapterNames
from splitserve.coordinator.lifecycle.membership import DRAINED
from splitserve.transport.messages.messages import (
    Adapter,
    BlockEvents,
    FirstToken,
    Goodbye,
    Joined,
    Move,
    Prefill,
    SamplingParams,
    StepTokens,
    u32,
)


class Adapted(Bench):
    """Prefill workers p, p2 and decode workers d, d2, which report adapters as ``name:content``."""

    def __init__(self, *more: str, **limits: Any) -> None:
        super().__init__(**{"dead_after_s": 1e9, "max_queue": 10_000, **limits})
        self.numbers = dict.fromkeys(("p", "d", "p2", "d2"), 0)
        for name, role in (("p2", "prefill"), ("d2", "decode")):
            self.hello(name, role)
        for name in self.numbers:
            self.report(name, *more)

    def report(self, worker: str, *adapters: str, incarnation: int = 1) -> list[Action]:
        """All adapters of a worker; None of an Adapter's name: ``:content``."""
        named = tuple(Adapter(name=name, content=content) for name, content in map(_parts, adapters))
        return self._events(worker, incarnation, adapters=named)

    def _events(self, worker: str, incarnation: int = 1, **more: Any) -> list[Action]:
        number = self.numbers[worker] = self.numbers.get(worker, 0) + 1
        more = {"reset": number == 1, **more}
        events = BlockEvents(worker_id=worker, incarnation=incarnation, number=number, **more)
        return self.send(worker, events, incarnation) + self.core.tick(self.now)

    def ask(self, name: str, adapter: str = "", **more: Any) -> list[Action]:
        shown = f"the-{adapter}" if adapter else ""
        return self.submit(name, adapter=adapter, adapter_name=shown, deadline=1e9, **more)

    def die(self, name: str) -> list[Action]:
        return self.core.process_ended((name, 1), self.now)

    @property
    def names(self) -> AdapterNames:
        return self.core.pools.adapters.names()


def _parts(adapter: str) -> tuple[str, str]:
    name, _, content = adapter.partition(":")
    return name, content


def routes(actions: list[Action]) -> list[tuple[str, str, str]]:
    """Return the request, the prefill and the decode worker of each prompt among these."""
    return [
        (a.message.spec.request_id, a.worker[0], a.message.decode.worker_id)
        for a in actions
        if isinstance(a, Send) and isinstance(a.message, Prefill)
    ]


def where(bench: Adapted, adapter: str = "") -> set[tuple[str, str]]:
    """Return the pairs that 16 requests go to, one after the other."""
    found = set()
    for n in range(16):
        found |= {route[1:] for route in routes(bench.ask(f"w{n}", adapter))}
        bench.core.cancel(f"w{n}", bench.now)
    return found


# --- where requests go -----------------------------------------------------------------------------------


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
    bench._events("d", stored=b"x" * 16)
    assert bench.names.served == {"a": "A"}
    for name in ("d", "d2"):
        bench._events(name, reset=True)
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


# --- requests that wait ----------------------------------------------------------------------------------


def test_a_request_waits_for_a_worker_that_may_come_back_and_then_ends_with_a_sentence() -> None:
    bench = Adapted(unserved_s=30.0)
    for name in ("p", "d"):
        bench.report(name, "a:A")
    bench.ask("r", "A")
    assert not ends(bench.die("d"))
    bench.core.tick(bench.now)
    bench.now += 29.0
    assert not ends(bench.core.tick(bench.now))
    bench.now += 2.0
    (ended,) = ends(bench.core.tick(bench.now))
    assert ended.error == "unavailable"
    assert ended.message == (
        "waited 30 s: the adapter 'the-A' is on no prefill and decode worker that fit together any more"
    )


def test_a_request_whose_adapter_no_worker_has_any_more_ends_at_once() -> None:
    bench = Adapted(max_num_seqs=1)
    for name in ("p", "d"):
        bench.report(name, "a:A")
    bench.ask("r", "A")
    assert routes(bench.ask("s", "A")) == []
    bench.report("p")
    (ended,) = ends(bench.report("d"))
    assert ended.error == "unavailable"
    assert ended.message.endswith("any more; send the request again")
    assert list(bench.core.requests) == ["r"]  # which runs on


def test_the_content_of_a_folder_that_has_changed_is_served_until_it_is_gone() -> None:
    bench = Adapted("a:A")
    for name in ("p", "p2", "d", "d2"):
        bench.report(name, "a:B", ":A")
    assert bench.names.served == {"a": "B"}
    assert len(routes(bench.ask("r", "A"))) == 1


def test_requests_for_an_adapter_that_is_not_there_hold_up_no_other() -> None:
    bench = Adapted("a:A", max_num_seqs=64, starving_s=2.0)
    for n in range(300):
        bench.ask(f"a{n}", "A", tenant=f"t{n % 9}")
    for name in ("d", "d2"):
        bench.report(name)  # p and p2 have it yet
    for request in list(bench.core.requests.values()):
        if request.dispatch >= 0:
            bench.core._machine.retry(request, "tested", bench.now, counts=False)
    assert len(bench.core.queue) == 300
    for passed in (0.0, 5.0):
        bench.now += passed
        for n in range(3):
            assert routes(bench.ask(f"r{passed}-{n}", tenant="t1"))


def busy_with(bench: Adapted, adapter: str, num: int) -> list[str]:
    """Submit this many requests; return those that wait."""
    return [f"{adapter}{n}" for n in range(num) if not routes(bench.ask(f"{adapter}{n}", adapter))]


def test_requests_whose_adapters_workers_are_full_hold_up_no_other() -> None:
    bench = Adapted(max_num_seqs=2, starving_s=2.0)
    for name in ("p", "p2", "d"):
        bench.report(name, "a:A")
    assert len(busy_with(bench, "A", 60)) == 58
    bench.now += 5.0
    assert [route[2] for route in routes(bench.ask("r"))] == ["d2"]


def test_a_request_for_an_adapter_does_not_starve_behind_others() -> None:
    """It needs the room of two others on d. As one of these ends, the next one waits already."""
    bench = Adapted(max_num_seqs=8, starving_s=2.0)
    for name in ("p", "p2", "d"):
        bench.report(name, "a:A")

    def small(name: str) -> list[tuple[str, str, str]]:
        """For the model itself: one block; its prompt is computed at once."""
        placed = routes(bench.ask(name, prompt_token_ids=[1]))
        for _, prefill, _ in placed:
            first = FirstToken(coordinator=7, dispatch=bench.core.requests[name].dispatch, index=0, token=5)
            placed += routes(bench.send(prefill, first))
        return placed

    names = [f"s{n}" for n in range(8)]
    on_d = [name for name in names if small(name)[0][2] == "d"]
    for name in on_d[3:]:
        bench.core.cancel(name, bench.now)
    bench.load("d2", [], blocks_free=1)
    bench.load("d", [], blocks_free=6)  # d has room for 8 tokens more, d2 for none
    assert bench.core.pools.workers["d", 1].room == 8
    assert not routes(bench.ask("r", "A", prompt_token_ids=[1] * 16))
    for n in range(9):
        bench.now += 1.0
        small(f"t{n}")  # another one waits, or takes the room
        here = [r.request_id for r in bench.core._machine.assignments.of(bench.core.pools.workers["d", 1])]
        if "r" in here:
            break
        bench.core.cancel(here[0], bench.now)
    assert 3 <= n < 8


def test_requests_that_wait_for_what_others_do_not_need_are_told_from_those_without_room() -> None:
    """A longer one before it found no room, which says nothing about the adapter's."""
    bench = Adapted("a:A", max_num_seqs=8, starving_s=2.0)
    for n in range(4):  # then the prefill workers take no prompt of 14 tokens or more
        assert routes(bench.ask(f"x{n}", prompt_token_ids=[1] * 14))
    assert not routes(bench.ask("r", "A", prompt_token_ids=[1] * 20))
    for name in ("d", "d2"):
        bench.report(name)
    bench.now += 5.0
    assert not routes(bench.ask("long", prompt_token_ids=[1] * 16, priority=-1))
    assert routes(bench.ask("short", prompt_token_ids=[1], priority=1))


def test_a_worker_with_the_adapter_serves_it_though_only_others_hold_sequences_as_long() -> None:
    bench = Adapted()
    bench.hello("short", "decode", max_model_len=20)
    for name in ("p", "short"):
        bench.report(name, "a:A")
    sampling = SamplingParams(max_tokens=100)
    assert routes(bench.ask("r", "A", sampling=sampling)) == [("r", "p", "short")]


# --- names -----------------------------------------------------------------------------------------------


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


# --- whatever comes --------------------------------------------------------------------------------------

WORKERS = ("p", "p2", "p3", "d", "d2", "d3")
CONTENTS = st.sets(st.sampled_from(["A", "B"]))


class Anything(RuleBasedStateMachine):
    """Workers come, report and go; requests for A, B and the model itself are submitted, run and end."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Adapted(max_num_seqs=2, starving_s=2.0)
        self.incarnations = dict.fromkeys(WORKERS, 1)
        self.has = {name: set[str]() for name in self.bench.numbers}
        self.numbers = count()
        self.open: set[str] = set()

    @initialize()
    def three_of_each_role(self) -> None:
        for name in ("p3", "d3"):
            self.comes(name)

    @rule(name=st.sampled_from(WORKERS))
    def comes(self, name: str) -> None:
        """Or it comes back, as a new process."""
        self.incarnations[name] += name in self.has
        self.has[name], self.bench.numbers[name] = set(), 0
        role = "prefill" if name[0] == "p" else "decode"
        self.take(self.bench.hello(name, role, incarnation=self.incarnations[name]))

    @rule(name=st.sampled_from(WORKERS), contents=CONTENTS)
    def reports(self, name: str, contents: set[str]) -> None:
        if name in self.has:
            self.has[name] = contents
            adapters = [f"{content.lower()}:{content}" for content in sorted(contents)]
            self.take(self.bench.report(name, *adapters, incarnation=self.incarnations[name]))

    @rule(name=st.sampled_from(WORKERS))
    def dies(self, name: str) -> None:
        if self.has.pop(name, None) is not None:
            self.take(self.bench.core.process_ended((name, self.incarnations[name]), self.bench.now))

    @rule(name=st.sampled_from(WORKERS))
    def drains(self, name: str) -> None:
        if name in self.has:
            self.take(self.bench.core.drain(name, None)[1])

    @rule(adapter=st.sampled_from(["", "A", "B"]), num_tokens=st.integers(1, 12))
    def is_submitted(self, adapter: str, num_tokens: int) -> None:
        name = f"r{next(self.numbers)}"
        self.open.add(name)
        sampling = SamplingParams(max_tokens=500)
        self.take(self.bench.ask(name, adapter, prompt_token_ids=[1] * num_tokens, sampling=sampling))

    @rule(place=st.integers(0, 50), ends=st.booleans())
    def goes_on(self, place: int, ends: bool) -> None:
        """Some request has its first token, joins, or ends."""
        core, bench = self.bench.core, self.bench
        running = [r for r in core.requests.values() if r.dispatch >= 0]
        if not running:
            return
        request = running[place % len(running)]
        index, head = len(request.tokens), {"coordinator": 7, "dispatch": request.dispatch}
        if request.state == "prefill" and request.prefill is not None:
            message: Any = FirstToken(index=index, token=5, **head)
            self.take(core.receive(request.prefill.id, message, bench.now))
        elif request.decode is not None and request.state == "handoff":
            message = Joined(index=index - 1, token=5, **head)
            self.take(core.receive(request.decode.id, message, bench.now))
        elif request.decode is not None and ends:
            rows = {"dispatches": u32([request.dispatch]), "indices": u32([index]), "tokens": u32([5])}
            step = StepTokens(coordinator=7, finished={0: "stop"}, **rows)
            self.take(core.receive(request.decode.id, step, bench.now))

    @rule(seconds=st.sampled_from([0.1, 3.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.now += seconds
        for worker in self.bench.core.pools.workers.values():
            worker.last_seen = worker.progressed = self.bench.now
        self.take(self.bench.core.tick(self.bench.now))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, End):
                self.open.remove(action.request.request_id)
            elif isinstance(action, Send) and isinstance(action.message, Prefill | Move):
                content = action.message.spec.adapter
                assert not content or content in self.has[action.message.decode.worker_id]
                if isinstance(action.message, Prefill):
                    assert not content or content in self.has[action.worker[0]]

    @invariant()
    def what_is_served_is_what_a_pair_has(self) -> None:
        index = self.bench.core.pools.adapters
        for content in ("A", "B"):
            having = {name[0] for name, contents in self.has.items() if content in contents}
            assert index.serves(content) == (having == {"p", "d"})

    @invariant()
    def no_open_request_is_forgotten(self) -> None:
        assert set(self.bench.core.requests) == self.open

    def teardown(self) -> None:
        """New workers with both adapters, and room for all: whatever waits is placed or has ended."""
        for name, role in (("pX", "prefill"), ("dX", "decode")):
            sizes = {"max_num_seqs": 999, "num_blocks": 10_000, "max_batch_tokens": 10_000}
            self.has[name], self.incarnations[name] = {"A", "B"}, 1
            self.take(self.bench.hello(name, role, **sizes))
            self.take(self.bench.report(name, "a:A", "b:B"))
        self.time_passes(10.0)
        assert not len(self.bench.core.queue)


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
