"""The cheapest or thriftiest cluster that serves a given rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .candidates import Candidate, middle_first
from .crew import Crew
from .goal import Goal, settings_of
from .goodput import Answer, Question, answer, failures, passes_sketched, sketched_goodput
from .looks import glance, look

MOST_SIMULATED = 12
MOST_GROWN = 4
"""Larger clusters that are simulated for a load that has grown."""


def smallest_that_serve(question: Question, goal: Goal, crew: Crew) -> dict[Candidate, float]:
    """By the sketch: of every pair of kinds with every setting, for each number of prefill workers the fewest
    decode workers. With the goodput of each, which is at least the goal's rate."""
    families = [one for family in _families(question) for one in settings_of(question, goal, family)]
    return {
        c: goal.rate for found in crew.ask(_of_family, [(goal, family) for family in families]) for c in found
    }


def _families(question: Question) -> Iterator[Candidate]:
    kinds = list(enumerate(question.hardware.kinds))
    for p, prefill in kinds:
        if prefill.prefills and prefill.decodes:
            yield Candidate(0, 0, 1, 1, 1, p, p)
        for d, decode in kinds:
            if prefill.prefills and decode.decodes and prefill.hands_to(decode):
                yield Candidate(1, 1, 0, 1, 1, p, d)


def _of_family(question: Question, goal: Goal, family: Candidate) -> list[Candidate]:
    if not family.prefill:
        n = _fewest(question, goal, [replace(family, colocated=n) for n in range(1, goal.limits.gpus + 1)])
        return [n] if n is not None else []
    found: list[Candidate] = []
    fewest_decode = _needed(question, goal, replace(family, prefill=1 << 20), "decode")
    for prefill in range(
        _needed(question, goal, replace(family, decode=1 << 20), "prefill"), goal.limits.gpus
    ):
        row = [
            replace(family, prefill=prefill, decode=decode)
            for decode in range(fewest_decode, goal.limits.gpus)
        ]
        row = [c for c in row if goal.limits.hold(c, question.hardware)]
        if not row:
            break
        one = _fewest(question, goal, row)
        if one is not None:
            found.append(one)
            if one.decode == fewest_decode:
                break  # more prefill workers save nothing
    return found


def _needed(question: Question, goal: Goal, candidate: Candidate, role: str) -> int:
    """Workers of this role below which the bound is not enough."""
    for n in range(1, goal.limits.gpus + 1):
        if question.bound(replace(candidate, **{role: n})) >= goal.rate:  # type: ignore[arg-type]
            return n
    return goal.limits.gpus


def _fewest(question: Question, goal: Goal, row: list[Candidate]) -> Candidate | None:
    """The first in order of size that serves the rate, and not only a short load, by bisection."""
    row = [c for c in row if goal.limits.hold(c, question.hardware) and question.bound(c) >= goal.rate]
    low, high = 0, len(row)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if passes_sketched(question, row[middle], goal.rate) else (middle + 1, high)
    return row[low] if low < len(row) else None


def smallest(
    question: Question, goal: Goal, candidates: list[Candidate], crew: Crew, known: dict[Candidate, Answer]
) -> None:
    """Adds to ``known`` the first that serves the rate in simulation, best value first, and what was tried
    before it. One that does not is tried again with a worker more on either side."""
    waiting, seen = list(candidates), set(candidates)
    for _ in range(MOST_SIMULATED):
        waiting.sort(key=lambda c: goal.value(question, c, goal.rate), reverse=True)
        if not waiting:
            break
        one = waiting.pop(0)
        failed, _ = failures(question, one, goal.rate)
        if failed <= question.allowed:
            (best,) = crew.ask(answer, [(one, 0.0, max(goal.rate * 1.02, sketched_goodput(question, one)))])
            best.goodput = max(best.goodput, goal.rate)
            known[one] = best
            return
        at_most = 1 - failed / len(question.load.requests)
        known[one] = Answer(one, question.bound(one), pruned=True, tried=[(goal.rate, at_most)])
        for more in (one.with_more(prefill=1), one.with_more(decode=1)):
            if more not in seen and goal.limits.hold(more, question.hardware):
                seen.add(more)
                waiting.append(more)


def least_more(question: Question, crew: Crew, candidate: Candidate, rate: float) -> tuple[Candidate, float]:
    """The cluster with the fewest workers more that serves ``rate``, and its attainment: sketched, then
    simulated."""
    more = 1
    for _ in range(MOST_GROWN):
        bigger = _least_more(question, candidate, rate, more)
        (seen,) = crew.ask(look, [(bigger, rate)])
        if seen.tallies.attainment >= question.level.attainment:
            break
        more = bigger.num_workers - candidate.num_workers + max(1, candidate.num_workers // 8)
    return bigger, seen.tallies.attainment


def _least_more(question: Question, candidate: Candidate, rate: float, at_least: int) -> Candidate:
    """The first cluster with ``at_least`` workers more that the sketch finds good enough and sustainable."""
    most = max(at_least, 2 * candidate.num_workers)
    for more in range(at_least, most + 1):
        divisions = range(more + 1) if candidate.prefill else [0]
        tried = [candidate.with_more(more - d, d) for d in divisions]
        seen = [(c, glance(question, c, rate)) for c in middle_first(tried) if question.bound(c) >= rate]
        enough = [(c, s) for c, s in seen if s.attainment >= question.level.attainment]
        if enough:
            return max(enough, key=lambda pair: pair[1].attainment)[0]
    of_prompts = round(most * candidate.prefill / candidate.num_workers)
    return candidate.with_more(of_prompts, most - of_prompts)
