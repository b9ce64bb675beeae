"""The highest rate at which enough requests are good, found by bisection.

    attainment(rate) = good requests / all requests        good: finished, and within all bounds at once
    goodput          = the highest rate with attainment(rate) >= the share asked for

The trace keeps its shape: a higher rate compresses its time, bursts and all. TPOT is (last token - first
token) / (tokens - 1). The same search runs over the sketch first, which costs a tenth or less, and from its
end over the simulator, if it may decide otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from ...traces.request import Trace, TraceRequest
from ..simulator.simulation import Simulation
from ..simulator.slo import ServiceLevel
from .candidates import Candidate, Group, Hardware, with_mover
from .demand import Demand, arrivals, bound
from .sketch import Sketch, Sketched, SketchPool
from .sketched_request import Arrival
from .step_times import StepTimes

PRECISION = 0.04
"""Bisection ends when the goodput is known to this share of itself."""
LOOK_S = 0.1
"""Virtual seconds between two looks whether a simulation is worth going on with."""
LOWEST = 64
"""A candidate that is not good enough at this fraction of its bound is not good enough."""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that every candidate is tried with."""

    requests: tuple[TraceRequest, ...]
    block_size: int | None

    @property
    def rate(self) -> float:
        """Requests a second from the first to the last arrival, as they are."""
        span = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return len(self.requests) / max(span, 1e-9)

    @property
    def is_tied(self) -> bool:
        """Whether blocks or sessions tie requests together, so that their order means something."""
        return any(r.block_hashes or r.session for r in self.requests)

    def at_rate(self, rate: float) -> Trace:
        first, factor = self.requests[0].arrival_s, self.rate / rate
        scaled = [replace(r, arrival_s=(r.arrival_s - first) * factor) for r in self.requests]
        return Trace("load", lambda: iter(scaled), self.block_size)

    def repeated(self, times: int) -> Load:
        """The same requests over and over, each time as long after the last time's end as they are apart on
        average."""
        first, again_s = (
            self.requests[0].arrival_s,
            (self.requests[-1].arrival_s - self.requests[0].arrival_s) + 1 / self.rate,
        )
        again = [
            replace(r, arrival_s=r.arrival_s - first + i * again_s)
            for i in range(times)
            for r in self.requests
        ]
        return replace(self, requests=tuple(again))

    def shuffled(self, seed: int) -> Load:
        """The same arrivals with the same lengths in another order: how much of a result is chance."""
        lengths = list(self.requests)
        random.Random(seed).shuffle(lengths)
        mixed = [
            replace(length, arrival_s=r.arrival_s) for r, length in zip(self.requests, lengths, strict=True)
        ]
        return replace(self, requests=tuple(mixed))


@dataclass(frozen=True)
class Question:
    """What is to be answered for each candidate."""

    hardware: Hardware
    load: Load
    level: ServiceLevel
    demand: Demand
    arrivals: tuple[Arrival, ...]
    seed: int = 0
    # those known, by rate
    energies: dict[tuple[Candidate, float], float | None] = field(default_factory=dict)
    _times: dict[tuple[int, int, int, str], StepTimes] = field(default_factory=dict)

    @classmethod
    def of(cls, hardware: Hardware, load: Load, level: ServiceLevel, seed: int = 0) -> Question:
        asked = arrivals(load.requests, load.block_size)
        return cls(hardware, load, level, Demand.of_arrivals(asked, hardware.longest), asked, seed)

    @property
    def allowed(self) -> float:
        """How many requests may fail."""
        # 0.1 of 600 are 60, and not 59.99
        return (1 - self.level.attainment) * len(self.load.requests) + 1e-6

    def bound(self, candidate: Candidate) -> float:
        asked = self.tpot_range
        return bound(candidate, self.hardware, self.demand, asked[1] if asked else None)

    @property
    def tpot_range(self) -> tuple[float, float] | None:
        """The least and the greatest TPOT asked for, with the mean context."""
        return self.level.bounds.tpot_range(self.demand.context)

    def repeated(self, times: int) -> Question:
        """The question for the same requests over and over, with the same cache hits each time."""
        load = self.load.repeated(times)
        asked = zip(load.requests, self.arrivals * times, strict=True)
        return replace(
            self, load=load, arrivals=tuple(replace(a, at_s=r.arrival_s) for r, a in asked), energies={}
        )

    def reordered(self, seed: int) -> Question:
        return self.of(self.hardware, self.load.shuffled(seed), self.level, seed)

    def with_slower_steps(self) -> Question:
        """By as much as the profiles' fits are off."""
        return replace(self, hardware=self.hardware.with_slower_steps(), energies={}, _times={})

    def times(self, group: Group, candidate: Candidate) -> StepTimes:
        key = group.kind, candidate.max_batch_tokens, group.max_num_seqs, candidate.mover
        if key not in self._times:
            profile = with_mover(self.hardware.kinds[group.kind].profile, candidate.mover)
            self._times[key] = StepTimes(profile, candidate.max_batch_tokens, group.max_num_seqs)
        return self._times[key]


@dataclass(slots=True)
class Answer:
    """``goodput``: requests a second; 0 if the candidate was no better than the best known (``pruned``) or
    never good enough. ``tried``: (rate, attainment); the attainment of a rate that fails is an upper bound.
    ``sketched``: the sketch's goodput."""

    candidate: Candidate
    bound: float
    goodput: float = 0.0
    pruned: bool = False
    sketched: float = 0.0
    tried: list[tuple[float, float]] = field(default_factory=list)
    num_requests: int = 0  # simulated

    @property
    def at_bound(self) -> bool:
        """Whether the search ended at the bound that no such cluster sustains. The load is short or the
        bounds are loose, and the goodput is at most this."""
        return self.goodput >= self.bound * (1 - PRECISION) > 0


def sketch(question: Question, candidate: Candidate, rate: float, give_up: bool = True) -> Sketched:
    """The candidate under the load at this rate, sketched."""
    pools = [
        SketchPool(question.times(g, candidate), g.count, g.role != "decode", g.role != "prefill")
        for g in candidate.groups
    ]
    first, factor = question.arrivals[0].at_s, question.load.rate / rate
    asked = [
        Arrival((a.at_s - first) * factor, a.num_new, a.num_prompt, a.num_output) for a in question.arrivals
    ]
    allowed = question.allowed if give_up else float("inf")
    return Sketch(pools, question.level.bounds, allowed, seed=question.seed).run(asked)


def passes_sketched(question: Question, candidate: Candidate, rate: float) -> bool:
    """Whether enough requests are good at this rate, by the sketch."""
    found = sketch(question, candidate, rate)
    return found.num_ended - found.num_good <= question.allowed


def sketched_goodput(question: Question, candidate: Candidate, at_least: float = 0.0) -> float:
    """By the sketch; 0 where it is not more than ``at_least``."""
    passes, most = partial(passes_sketched, question, candidate), question.bound(candidate)
    if most <= at_least or (at_least > 0 and not passes(at_least)):
        return 0.0
    return _bisected(passes, at_least, most)


def simulate(question: Question, candidate: Candidate, rate: float, give_up: bool = True) -> Simulation:
    """The candidate under the load at this rate, simulated. With ``give_up`` it ends as soon as too many
    requests have failed, or will have: see ``num_failed``."""
    cluster = question.hardware.cluster(candidate, max_queue=1 << 30)
    simulation = Simulation(cluster, question.seed, question.level.bounds)
    look_at = 0.0

    def too_many_failed() -> bool:
        nonlocal look_at
        now = simulation.queue.now
        if now < look_at or not give_up:
            return False
        look_at = now + LOOK_S
        return num_failed(simulation) > question.allowed

    simulation.run(question.load.at_rate(rate), too_many_failed)
    return simulation


def failures(question: Question, candidate: Candidate, rate: float) -> tuple[float, int]:
    """Requests that fail, or more than are allowed to; and how many were simulated: none where the sketch
    decides as the simulator does (tests/planner/test_sketched_cluster.py)."""
    (kind, *others), num = question.hardware.kinds, question.hardware.workers_per_host
    if not (question.load.is_tied or others or kind.profile.noise_cv or num > 1):
        found = sketch(question, candidate, rate)
        if found.is_exact:
            return found.num_ended - found.num_good, 0
    simulation = simulate(question, candidate, rate)
    return num_failed(simulation), simulation.num_arrived


def num_failed(simulation: Simulation) -> float:
    """Requests that were not good, or are late already and will not be."""
    tallies, now, running = simulation.tallies, simulation.queue.now, simulation.coordinator.open.values()
    return tallies.slo.failed(
        [
            missed + sum(part.is_missed_by(record, now) for record in running)
            for part, missed in zip(tallies.slo.parts, tallies.missed, strict=True)
        ]
    )


def answer(question: Question, candidate: Candidate, at_least: float = 0.0, guess: float = 0.0) -> Answer:
    """The candidate's goodput, if it is more than ``at_least``. ``guess``: where to begin; the nearer, the
    fewer simulations."""
    found = Answer(candidate, question.bound(candidate), sketched=guess)
    if found.bound <= at_least:
        found.pruned = True
        return found
    low, high = 0.0, found.bound
    if at_least > 0:
        if not _passes(question, found, at_least * (1 + PRECISION / 2)):
            found.pruned = True
            return found
        low = at_least * (1 + PRECISION / 2)
    passes = partial(_passes, question, found)
    low, high = _bracketed(passes, low, high, guess)
    found.goodput = _bisected(passes, low, high, found.bound)
    return found


def _bracketed(passes: Callable[[float], bool], low: float, high: float, guess: float) -> tuple[float, float]:
    """Steps of 4, 8, 16% ... away from the guess, until the goodput lies between two of them."""
    if not low < guess < high:
        return low, high
    upwards, step = passes(guess), PRECISION
    low, high = (guess, high) if upwards else (low, guess)
    while True:
        rate = low * (1 + step) if upwards else high * (1 - step)
        if not low < rate < high or step > 0.5:
            return low, high
        passed = passes(rate)
        low, high = (rate, high) if passed else (low, rate)
        if passed is not upwards:
            return low, high
        step *= 2


def _bisected(passes: Callable[[float], bool], low: float, high: float, most: float = 0.0) -> float:
    most = most or high
    while high - low > PRECISION * high and high > most / LOWEST:
        middle = (low + high) / 2 if low else high / 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def _passes(question: Question, found: Answer, rate: float) -> bool:
    failed, num_simulated = failures(question, found.candidate, rate)
    found.tried.append((rate, 1 - failed / len(question.load.requests)))
    found.num_requests += num_simulated
    return failed <= question.allowed
