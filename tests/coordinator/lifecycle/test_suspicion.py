"""One poisonous request takes down a bounded number of workers, and nobody else's request fails for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lifecycle_bench import Bench, ends, sent

from splitserve.coordinator.lifecycle.actions import Action, End
from splitserve.coordinator.lifecycle.request import Ended
from splitserve.transport.messages.messages import (
    Goodbye,
    Joined,
    Prefill,
    SamplingParams,
    StepTokens,
    from_u32,
    u32,
)


class Cluster(Bench):
    """Two prefill and two decode workers that the test plays: a worker that runs ``poison`` dies and comes
    back, once that has brought ``fuse`` more tokens."""

    def __init__(self, poison: str, fuse: int = 0, **limits: Any) -> None:
        super().__init__(**limits)
        self.poison, self.fuse = poison, fuse
        self.incarnations = {"p": 1, "d": 1, "p2": 1, "d2": 1}
        self.hello("p2", "prefill")
        self.hello("d2", "decode")
        self.running: dict[
            int, tuple[str, str, int, int]
        ] = {}  # dispatch: request, decode worker, next index, last index
        self.dies_at: dict[int, int] = {}  # dispatch of the poison: index
        self.ended: dict[str, Ended] = {}
        self.deaths = 0

    def play(self, actions: list[Action]) -> None:
        """What the workers would do with these: a prompt joins its decode worker at once."""
        self.ended |= {
            action.request.request_id: action.ended for action in actions if isinstance(action, End)
        }
        for prefill in sent(actions, Prefill):
            spec, decode = prefill.spec, prefill.decode.worker_id
            index = spec.num_tokens - spec.num_prompt_tokens
            self.running[spec.dispatch] = (spec.request_id, decode, index + 1, spec.sampling.max_tokens - 1)
            if spec.request_id == self.poison:
                self.dies_at[spec.dispatch] = index + 1 + self.fuse
            joined = Joined(coordinator=7, dispatch=spec.dispatch, index=index, token=3)
            self.play(self.send(decode, joined, self.incarnations[decode]))

    def turn(self) -> None:
        """Each decode worker makes a step, or dies of it."""
        for worker in ("d", "d2"):
            here = {d: r for d, r in self.running.items() if r[1] == worker}
            if any(at >= self.dies_at.get(dispatch, at + 1) for dispatch, (_, _, at, _) in here.items()):
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
                self.play(self.send(worker, step, self.incarnations[worker]))
        self.now += 0.01
        self.play(self.core.tick(self.now))


@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(1, 12),
    poison=st.integers(0, 11),
    fuse=st.sampled_from((0, 0, 19, 39)),
    lengths=st.lists(st.integers(2, 120), min_size=12, max_size=12),
)
def test_the_poison_fails_after_a_few_deaths_and_all_others_finish(
    num: int, poison: int, fuse: int, lengths: list[int]
) -> None:
    cluster = Cluster(f"r{poison}", fuse, dead_after_s=1e9)
    lengths[poison] = 400
    for i in range(num):
        cluster.play(cluster.submit(f"r{i}", sampling=SamplingParams(max_tokens=lengths[i]), deadline=1e6))
    for _ in range(3000):
        if len(cluster.ended) == num:
            break
        cluster.turn()
    assert len(cluster.ended) == num
    for name, ended in cluster.ended.items():
        assert (ended.error == "failed") == (name == cluster.poison), (name, ended)
    assert cluster.deaths <= {0: 4, 19: 8, 39: 9}[fuse]
    if f"r{poison}" in cluster.ended:
        assert "4 workers in a row died" in cluster.ended[cluster.poison].message


class OneByOne(Bench):
    """One request, whose worker dies after a given number of its tokens."""

    def __init__(self, gain: int, **limits: Any) -> None:
        super().__init__(**limits)
        self.gain, self.life = gain, 1
        self.submit(sampling=SamplingParams(max_tokens=10**6), deadline=1e6)

    def live(self) -> None:
        """The request runs, and brings its tokens."""
        dispatch = self.core.pools.workers[("d", self.life)].dispatches.copy().pop()
        start = len(self.core.requests["r"].tokens)
        self.send("d", Joined(coordinator=7, dispatch=dispatch, index=start, token=1), self.life)
        for index in range(start + 1, start + self.gain):
            rows = {"dispatches": u32([dispatch]), "indices": u32([index]), "tokens": u32([2])}
            self.send("d", StepTokens(coordinator=7, **rows), self.life)

    def die(self) -> list[str]:
        """Its worker dies, and comes back: what ended the request, if anything did."""
        self.life += 1
        return [ended.message for ended in ends(self.hello("d", "decode", self.life, num_blocks=10**6))]

    def leave(self) -> list[str]:
        """Its worker leaves in good order, without having found another one for it, and comes back."""
        self.send("d", Goodbye(worker_id="d", incarnation=self.life), self.life)
        return self.die()


@pytest.mark.parametrize(("gain", "deaths"), [(15, 4), (16, 8), (40, 9), (300, 12), (600, 13)])
def test_who_meets_death_after_death_is_given_up_the_sooner_the_less_it_brings(
    gain: int, deaths: int
) -> None:
    """However often it makes a little progress: a request has a bounded number of deaths, and an answer that
    makes much outlives many."""
    bench = OneByOne(gain)
    for _ in range(deaths - 1):
        bench.live()
        assert bench.die() == []
    bench.live()
    (message,) = bench.die()
    assert message.startswith(
        "4 workers in a row died while they ran this request" + (f" ({deaths} in all)" if deaths > 4 else "")
    )


def test_workers_that_leave_in_good_order_are_no_deaths() -> None:
    bench = OneByOne(gain=3)
    for _ in range(30):
        bench.live()
        assert bench.leave() == []


def test_one_death_is_one_however_far_it_had_come() -> None:
    """Its own death was cleared with those before it."""
    bench = OneByOne(gain=100, suspect_after=1)
    bench.live()
    bench.die()
    assert len(bench.core._machine.suspicion.suspects) == 1
    bench.live()
    bench.core.tick(0.0)
    assert len(bench.core._machine.suspicion.suspects) == 0


def test_a_prompt_that_waits_for_a_dying_decode_worker_is_not_charged() -> None:
    bench = Bench(max_deaths=1)
    bench.submit()
    (again,) = sent(bench.hello("d", "decode", incarnation=2), Prefill)
    assert from_u32(again.spec.token_ids) == [1, 2, 3]
    assert ends(bench.hello("p", "prefill", incarnation=2)) != []  # it was computing it


def test_who_is_there_at_death_after_death_is_charged_though_a_suspect_is_too() -> None:
    """The only decode worker dies twice of something else while "s" runs on it, and then of "p", which nobody
    suspects: "s" is. Once "p" is excused, as any neighbour of a suspect is."""
    bench = Bench()
    bench.submit("s", sampling=SamplingParams(max_tokens=100), deadline=1e6)
    life, num_deaths = 1, []
    for deaths in range(4):
        if deaths == 2:
            bench.submit("p", sampling=SamplingParams(max_tokens=100), deadline=1e6)
        requests = bench.core.requests
        for request in list(requests.values()):
            assert request.decode is not None, (
                "one suspect alone does not keep others away where there is one worker"
            )
            bench.send(
                "d",
                Joined(coordinator=7, dispatch=request.dispatch, index=len(request.tokens), token=1),
                life,
            )
        life += 1
        actions = bench.hello("d", "decode", life)
        num_deaths.append({name: request.num_deaths for name, request in requests.items()})
    assert num_deaths == [{"s": 1}, {"s": 2}, {"s": 3, "p": 0}, {"p": 1}]
    assert [ended.error for ended in ends(actions)] == ["failed"]
