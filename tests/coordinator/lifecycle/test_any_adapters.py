"""Workers come, report adapters and go: no request goes astray, and none is forgotten."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.adapted_bench import Adapted

from splitserve.coordinator.lifecycle.actions import Action, End, Send
from splitserve.transport.messages.messages import (
    FirstToken,
    Joined,
    Move,
    Prefill,
    SamplingParams,
    StepTokens,
    u32,
)

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
