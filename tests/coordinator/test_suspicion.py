"""One poisonous request takes down a bounded number of workers, and nobody else's request fails for it."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.lifecycle_bench import Bench, ends, sent

from splitserve.coordinator.flight import Action, End
from splitserve.coordinator.request import Ended
from splitserve.transport.messages import Joined, Prefill, Sampling, StepTokens, from_u32, u32


class Cluster(Bench):
    """Two prefill and two decode workers that the test plays: a worker that runs ``poison`` dies and comes back."""

    def __init__(self, poison: str, **limits: Any) -> None:
        super().__init__(**limits)
        self.poison = poison
        self.incarnations = {"p": 1, "d": 1, "p2": 1, "d2": 1}
        self.hello("p2", "prefill")
        self.hello("d2", "decode")
        self.running: dict[int, tuple[str, str, int, int]] = {}  # dispatch: request, decode worker, next index, last index
        self.ended: dict[str, Ended] = {}
        self.deaths = 0

    def play(self, actions: list[Action]) -> None:
        """What the workers would do with these: a prompt joins its decode worker at once."""
        self.ended |= {action.request.request_id: action.ended for action in actions if isinstance(action, End)}
        for prefill in sent(actions, Prefill):
            spec, decode = prefill.spec, prefill.decode.worker_id
            index = spec.num_tokens - spec.num_prompt_tokens
            self.running[spec.dispatch] = (spec.request_id, decode, index + 1, spec.sampling.max_tokens - 1)
            joined = Joined(coordinator=7, dispatch=spec.dispatch, index=index, token=3)
            self.play(self.say(decode, joined, self.incarnations[decode]))

    def turn(self) -> None:
        """Each decode worker makes a step, or dies of it."""
        for worker in ("d", "d2"):
            here = {d: r for d, r in self.running.items() if r[1] == worker}
            if any(request == self.poison for request, *_ in here.values()):
                self.running = {d: r for d, r in self.running.items() if r[1] != worker}
                self.deaths += 1
                self.incarnations[worker] += 1
                self.play(self.hello(worker, "decode", self.incarnations[worker]))
            elif here:
                done = [row for row, r in enumerate(here.values()) if r[2] >= r[3]]
                step = StepTokens(
                    coordinator=7,
                    dispatches=u32(list(here)),
                    indices=u32([r[2] for r in here.values()]),
                    tokens=u32([4] * len(here)),
                    finished=dict.fromkeys(done, "length"),
                )
                self.running = {d: r for d, r in self.running.items() if r[1] != worker or r[2] < r[3]}
                self.running |= {d: (r[0], r[1], r[2] + 1, r[3]) for d, r in here.items() if r[2] < r[3]}
                self.play(self.say(worker, step, self.incarnations[worker]))
        self.now += 0.01
        self.play(self.core.tick(self.now))


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 12), poison=st.integers(0, 11), lengths=st.lists(st.integers(2, 40), min_size=12, max_size=12))
def test_the_poison_fails_after_a_few_deaths_and_all_others_finish(num: int, poison: int, lengths: list[int]) -> None:
    cluster = Cluster(f"r{poison}", dead_after_s=1e9)
    for i in range(num):
        cluster.play(cluster.submit(f"r{i}", sampling=Sampling(max_tokens=lengths[i]), deadline=1e6))
    for _ in range(2000):
        if len(cluster.ended) == num:
            break
        cluster.turn()
    assert len(cluster.ended) == num
    for name, ended in cluster.ended.items():
        assert (ended.error == "failed") == (name == cluster.poison), (name, ended)
    assert cluster.deaths <= 4
    if f"r{poison}" in cluster.ended:
        assert "4 workers in a row died" in cluster.ended[cluster.poison].message


def test_who_makes_progress_between_deaths_is_never_suspected() -> None:
    bench = Bench(max_deaths=2)
    bench.submit(sampling=Sampling(max_tokens=400))
    for life in range(1, 8):
        dispatch = bench.core.pools.workers[("d", life)].dispatches.copy().pop()
        start = len(bench.core._state.table.flights["r"].tokens)
        bench.say("d", Joined(coordinator=7, dispatch=dispatch, index=start, token=1), life)
        for index in range(start + 1, start + 20):
            rows = {"dispatches": u32([dispatch]), "indices": u32([index]), "tokens": u32([2])}
            bench.say("d", StepTokens(coordinator=7, **rows), life)
        assert not ends(bench.hello("d", "decode", life + 1))


def test_a_prompt_that_waits_for_a_dying_decode_worker_is_not_charged() -> None:
    bench = Bench(max_deaths=1)
    bench.submit()
    (again,) = sent(bench.hello("d", "decode", incarnation=2), Prefill)
    assert from_u32(again.spec.token_ids) == [1, 2, 3]
    assert ends(bench.hello("p", "prefill", incarnation=2)) != []  # it was computing it
