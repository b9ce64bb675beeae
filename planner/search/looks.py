"""One candidate at one rate, looked at closely: what the words and plots of a plan are made of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..simulator.report import outside, pools
from ..simulator.tallies import Tallies
from .candidates import Candidate
from .goal import energy_of
from .goodput import Question, simulate, sketch, sketched_goodput


@dataclass(frozen=True, slots=True)
class Look:
    """Simulated to the end. ``busy``: by pool's role; ``extrapolated``: shares of the steps that no
    measurement covers."""

    rate: float
    tallies: Tallies
    busy: dict[str, float]
    extrapolated: dict[str, float]


@dataclass(frozen=True, slots=True)
class Glance:
    """Sketched. Percentiles in seconds."""

    rate: float
    attainment: float
    ttft_p90_s: float
    tpot_p90_s: float
    busy: dict[str, float]
    energy_wh: float | None


def look(question: Question, candidate: Candidate, rate: float) -> Look:
    simulation = simulate(question, candidate, rate, give_up=False)
    busy = {row["role"]: row["busy"] for row in pools(simulation)}
    return Look(rate, simulation.tallies, busy, outside(simulation))


def glance(question: Question, candidate: Candidate, rate: float) -> Glance:
    found = sketch(question, candidate, rate, give_up=False)
    busy_s, counts = defaultdict[str, float](float), Counter[str]()
    for group, seconds in zip(candidate.groups, found.busy_s, strict=True):
        busy_s[group.role] += sum(seconds) / max(found.elapsed_s, 1e-9)
        counts[group.role] += group.count
    busy = {role: busy_s[role] / num for role, num in counts.items()}
    energy = energy_of(found, question.hardware, candidate)
    return Glance(rate, found.attainment, _p90(found.ttft_s), _p90(found.tpot_s), busy, energy)


def _p90(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))] if ordered else 0.0


def by_chance(question: Question, candidate: Candidate, goodput: float, which: int) -> tuple[float, Look]:
    """The goodput under the same load in another order, changed as much as the sketch's, and the look at the
    same rate; under one half of the load where its requests are tied together."""
    if question.load.is_tied:
        half = len(question.load.requests) // 2
        part = question.load.requests[:half] if which == 1 else question.load.requests[half:]
        other = Question.of(question.hardware, replace(question.load, requests=part), question.level, which)
    else:
        other = question.reordered(which)
    pace = other.load.rate / question.load.rate  # each half keeps its own
    ratio = _ratio(sketched_goodput(other, candidate) / pace, sketched_goodput(question, candidate))
    return goodput * ratio, look(other, candidate, goodput * pace)


def if_slower(question: Question, candidate: Candidate, goodput: float) -> float | None:
    """The goodput where every step takes longer by as much as its profile's fit is off on average, changed as
    much as the sketch's. None: no fit's error is known."""
    if question.hardware.fit_errors(candidate) == (None, None):
        return None
    slower = sketched_goodput(question.with_slower_steps(), candidate)
    return goodput * _ratio(slower, sketched_goodput(question, candidate))


def _ratio(changed: float, planned: float) -> float:
    return changed / planned if planned else 0.0
