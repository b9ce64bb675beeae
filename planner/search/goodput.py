"""The highest rate at which enough requests are good, found by simulation and bisection.

    attainment(rate) = good requests / all requests        good: finished, and within all bounds at once
    goodput          = the highest rate with attainment(rate) >= the share asked for

The trace keeps its shape: a higher rate compresses its time, bursts and all. TPOT is (last token - first token) / (tokens - 1).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ..simulator.simulation import Simulation
from ..simulator.tallies import Tallies
from ..slo import ServiceLevel
from ..trace.request import Trace, TraceRequest
from .candidates import Candidate, Demand, Hardware, bound

PRECISION = 0.04
"""Bisection ends when the goodput is known to this share of itself."""
LOWEST = 64
"""A candidate that is not good enough at this fraction of its bound is not good enough."""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that every candidate is tried with."""

    requests: tuple[TraceRequest, ...]
    block_size: int | None

    @property
    def rate(self) -> float:
        """Requests a second as they are."""
        span = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return (len(self.requests) - 1) / max(span, 1e-9)

    def at_rate(self, rate: float) -> Trace:
        first, factor = self.requests[0].arrival_s, self.rate / rate
        scaled = [replace(r, arrival_s=(r.arrival_s - first) * factor) for r in self.requests]
        return Trace("load", lambda: iter(scaled), self.block_size)

    def shuffled(self, seed: int) -> Load:
        """The same arrivals with the same lengths in another order: how much of a result is chance."""
        lengths = list(self.requests)
        random.Random(seed).shuffle(lengths)
        mixed = [replace(length, arrival_s=r.arrival_s) for r, length in zip(self.requests, lengths, strict=True)]
        return replace(self, requests=tuple(mixed))


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be answered for each candidate."""

    hardware: Hardware
    load: Load
    level: ServiceLevel
    demand: Demand
    seed: int = 0

    @classmethod
    def of(cls, hardware: Hardware, load: Load, level: ServiceLevel, seed: int = 0) -> Question:
        return cls(hardware, load, level, Demand.of(load.requests, load.block_size), seed)


@dataclass(slots=True)
class Answer:
    """``goodput``: requests a second; 0 where the candidate was not better than what was known (``pruned``) or never good enough.
    ``tried``: (rate, attainment), where the attainment of a rate that fails is an upper bound."""

    candidate: Candidate
    bound: float
    goodput: float = 0.0
    pruned: bool = False
    tried: list[tuple[float, float]] = field(default_factory=list)
    num_requests: int = 0  # simulated


def simulate(question: Question, candidate: Candidate, rate: float, give_up: bool = True) -> Simulation:
    """The candidate under the load at this rate, simulated. With ``give_up`` it ends as soon as too many requests have failed."""
    cluster = question.hardware.cluster(candidate, max_queue=1 << 30)
    simulation = Simulation(cluster, question.seed, question.level.bounds)
    allowed = (1 - question.level.attainment) * len(question.load.requests)

    def hopeless(tallies: Tallies) -> bool:
        return tallies.num_requests - tallies.num_good > allowed

    simulation.run(question.load.at_rate(rate), give_up=hopeless if give_up else None)
    return simulation


def answer(question: Question, candidate: Candidate, at_least: float = 0.0) -> Answer:
    """The candidate's goodput, if it is more than ``at_least``."""
    most = bound(candidate, question.hardware, question.demand, question.level.bounds.tpot_s)
    found = Answer(candidate, most)
    if most <= at_least:
        found.pruned = True
        return found
    low, high = 0.0, most
    if at_least > 0:
        if not _passes(question, found, at_least * (1 + PRECISION / 2)):
            found.pruned = True
            return found
        low = at_least * (1 + PRECISION / 2)
    while high - low > PRECISION * high and high > most / LOWEST:
        middle = (low + high) / 2 if low else high / 2
        if _passes(question, found, middle):
            low = middle
        else:
            high = middle
    found.goodput = low
    return found


def _passes(question: Question, found: Answer, rate: float) -> bool:
    tallies = simulate(question, found.candidate, rate).tallies
    total = len(question.load.requests)
    failed = tallies.num_requests - tallies.num_good
    found.tried.append((rate, 1 - failed / total))
    found.num_requests += tallies.num_requests
    return failed <= (1 - question.level.attainment) * total
