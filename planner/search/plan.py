"""What the search comes to: the recommended cluster, what it was held against, and what was seen of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .candidates import Candidate
from .goal import Goal
from .goodput import Answer, Question
from .looks import Glance, Look

GROWTH = 1.5
LIVES_TO_FILL = 4
"""Mean lives of a request that a load must last at least, so that the cluster fills."""


@dataclass(slots=True)
class Growth:
    """``attainment`` of ``candidate`` under ``GROWTH`` times the load; ``unchanged``: of the cluster as it
    is."""

    candidate: Candidate
    attainment: float
    unchanged: float


@dataclass(slots=True)
class Means:
    """What a plan from means would build, the rate that it would expect, and the attainment there."""

    candidate: Candidate
    expected: float
    attainment: float


@dataclass(slots=True)
class Plan:
    """``split``: the best of those whose workers do one thing each; ``best``: of all that disaggregate, with
    or without colocated workers beside; ``colocated``: of those that do not. ``sketches``: by candidate, the
    goodput that the sketch gives to each ratio at its best settings. ``others``: (goodput, look) of the
    winner under the same load in other orders. ``warnings``: such as that the rest of the trace is harder
    than the planned part."""

    question: Question
    goal: Goal
    split: Answer
    best: Answer
    colocated: Answer
    answers: list[Answer]
    neighbours: list[Answer]
    sketches: dict[Candidate, float]
    at_goodput: Look
    relaxed: Look  # at four fifths of the goodput, or at the rate asked for
    others: list[tuple[float, Look]]
    growth: Growth
    means: Means
    energy_wh: float | None  # a request of the winner, by the sketch
    # the winner's goodput, were all steps slower by their profile's error; None: that is not known
    if_slower: float | None
    # its goodput, by the sketch, where the load comes over and over; None: the load is not short
    sustained: float | None = None
    # its goodput, by the sketch, over more of the trace than was planned on; None: that is not harder
    whole: tuple[int, float] | None = None  # (requests, goodput)
    curves: dict[Candidate, list[Glance]] = field(default_factory=dict)
    sizes: dict[Candidate, Glance] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def winner(self) -> Answer:
        return self.best if self.disaggregates else self.colocated

    @property
    def disaggregates(self) -> bool:
        """Whether a split is recommended; also if both are equally good, because its latencies are
        steadier."""
        return self.value(self.best) >= self.value(self.colocated)

    @property
    def served(self) -> float:
        """Requests/s that the winner serves for long, as far as that is known."""
        known = self.winner.goodput, self.sustained, self.whole and self.whole[1]
        return min(rate for rate in known if rate is not None)

    @property
    def num_simulated(self) -> int:
        looked = [self.at_goodput, self.relaxed, *(one for _, one in self.others)]
        return sum(a.num_requests for a in self.answers) + sum(one.tallies.num_requests for one in looked)

    @property
    def life_s(self) -> float:
        """Mean life of a request at the winner's goodput, in seconds."""
        return self.at_goodput.tallies.percentiles()["e2e"]["mean"]

    def is_short(self, one: Answer) -> bool:
        """Whether the load, at this one's goodput, is over before a cluster has filled: for long it serves
        less."""
        return (
            one.goodput > 0 and len(self.question.load.requests) / one.goodput <= LIVES_TO_FILL * self.life_s
        )

    def is_at_most(self, one: Answer) -> bool:
        """Whether its goodput is the most that it may be, and not what it is: for the load's shortness, or
        the bounds' looseness."""
        return self.goal.objective == "goodput" and (one.at_bound or self.is_short(one))

    def value(self, one: Answer) -> float:
        return self.goal.value(self.question, one.candidate, one.goodput)
