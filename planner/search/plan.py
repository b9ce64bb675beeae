"""The search: which ratio, chunk budget and batch give the highest goodput, by how much, and against what.

Candidates are tried in the order of their bounds, each at the rate of the best one so far: most fail that one simulation, and those
whose bound is below it are never simulated. The best, its neighbours and the colocated alternative are bisected in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context

from ..simulator.report import outside
from ..simulator.tallies import Tallies
from .candidates import Candidate, bound, largest_batch, splits
from .goodput import Answer, Question, answer, simulate

GROWTH = 1.5
Report = Callable[[str], None]


@dataclass(slots=True)
class Plan:
    """``others``: goodput of the best under the same load in other orders. ``means``: what a plan from means would build and expect."""

    question: Question
    best: Answer
    colocated: Answer
    answers: list[Answer]
    others: list[float]
    at_goodput: Tallies
    relaxed: Tallies  # at four fifths of the goodput
    grown: tuple[Candidate, float]  # for half as much load again, and its attainment there
    means: tuple[Candidate, float, float]  # the candidate, the rate it was expected to serve, the attainment there
    extrapolated: dict[str, float]  # shares of the steps at the goodput that no measurement covers
    num_simulated: int

    @property
    def disaggregates(self) -> bool:
        return self.best.goodput > self.colocated.goodput

    @property
    def neighbours(self) -> list[Answer]:
        """One worker more on either side."""
        b = self.best.candidate
        return [a for a in self.answers if a.candidate != b and abs(a.candidate.prefill - b.prefill) == 1 and _alike(a.candidate, b)]


def search(question: Question, num_workers: int, chunks: tuple[int, ...], jobs: int, report: Report = lambda _: None) -> Plan:
    """``chunks``: budgets of prompt tokens in a step to choose from; ``jobs``: processes. ``report``: hears what is being done."""
    profile = question.hardware.decode
    batch = 2 * largest_batch(profile, question.demand, question.level.bounds.tpot_s)  # few steps are as full as the fullest
    with _asking(question, jobs) as ask:
        report("ratios")
        answers = _best_first(question, splits(num_workers, max(chunks), batch), ask, jobs)
        best = max(answers, key=lambda a: a.goodput)
        report(f"{best.candidate.ratio}: chunk budgets and batches")
        variants = [replace(best.candidate, max_batch_tokens=chunk) for chunk in chunks if chunk != max(chunks)]
        variants += [replace(best.candidate, max_num_seqs=n) for n in (2 * batch, batch // 2)]
        tuned = list(ask([(variant, best.goodput) for variant in variants]))
        best = max([best, *tuned], key=lambda a: a.goodput)
        report("neighbours, and the same workers colocated")
        around = [_moved(best.candidate, by) for by in (-1, 1)]
        wanted = [c for c in around if c is not None]
        together = [Candidate(0, 0, num_workers, chunk, n) for chunk in chunks for n in (batch,)]
        results = list(ask([(c, 0.0) for c in (*wanted, *together)]))
        colocated = max(results[len(wanted) :], key=lambda a: a.goodput)
        best = max([best, *results[: len(wanted)]], key=lambda a: a.goodput)
        report("how much of this is chance")
        others = [a.goodput for a in _reordered(question, best.candidate, jobs)]
    by_means = max(splits(num_workers, max(chunks), batch), key=lambda c: bound(c, question.hardware, question.demand, None))
    expected = bound(by_means, question.hardware, question.demand, None)
    winner = best if best.goodput >= colocated.goodput else colocated
    bigger = winner.candidate.grown(GROWTH)
    rate = winner.goodput or winner.bound / 10
    at_growth = simulate(question, bigger, rate * GROWTH, give_up=False).tallies
    at_means = simulate(question, by_means, expected, give_up=False).tallies
    at_goodput = simulate(question, winner.candidate, rate, give_up=False)
    everything = [*answers, *tuned, *results]
    return Plan(
        question,
        best,
        colocated,
        _known_best(everything),
        others,
        at_goodput=at_goodput.tallies,
        relaxed=simulate(question, winner.candidate, 0.8 * rate, give_up=False).tallies,
        grown=(bigger, at_growth.attainment),
        means=(by_means, expected, at_means.attainment),
        extrapolated=outside(at_goodput),
        num_simulated=sum(a.num_requests for a in everything) + 4 * len(question.load.requests),
    )


Asked = tuple[Candidate, float]
_question: Question | None = None


@contextmanager
def _asking(question: Question, jobs: int) -> Iterator[Callable[[list[Asked]], Iterable[Answer]]]:
    """A function that answers for many candidates, in so many processes."""
    if jobs == 1:
        yield lambda asked: [answer(question, candidate, at_least) for candidate, at_least in asked]
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _remember, (question,)) as pool:
        yield lambda asked: pool.map(_answer, asked)


def _remember(question: Question) -> None:
    global _question
    _question = question


def _answer(asked: Asked) -> Answer:
    assert _question is not None, "the process was told"
    return answer(_question, *asked)


def _best_first(question: Question, candidates: list[Candidate], ask: Callable[[list[Asked]], Iterable[Answer]], jobs: int) -> list[Answer]:
    """As many at a time as there are processes; what is known by then is what the next ones must exceed."""
    tpot_s = question.level.bounds.tpot_s
    waiting = sorted(candidates, key=lambda c: bound(c, question.hardware, question.demand, tpot_s), reverse=True)
    answers: list[Answer] = []
    while waiting:
        known = max((a.goodput for a in answers), default=0.0)
        answers += ask([(candidate, known) for candidate in waiting[:jobs]])
        waiting = waiting[jobs:]
    return answers


def _reordered(question: Question, candidate: Candidate, jobs: int) -> list[Answer]:
    """The same load in two other orders. None where its blocks or sessions tie requests together."""
    if any(r.block_hashes or r.session for r in question.load.requests):
        return []
    return [answer(replace(question, load=question.load.shuffled(seed), seed=seed), candidate) for seed in (1, 2)]


def _moved(candidate: Candidate, by: int) -> Candidate | None:
    prefill = candidate.prefill + by
    if not 1 <= prefill < candidate.num_workers:
        return None
    return replace(candidate, prefill=prefill, decode=candidate.num_workers - prefill)


def _alike(a: Candidate, b: Candidate) -> bool:
    return (a.max_batch_tokens, a.max_num_seqs, a.num_workers) == (b.max_batch_tokens, b.max_num_seqs, b.num_workers)


def _known_best(answers: list[Answer]) -> list[Answer]:
    """One answer a candidate: the one that knows its goodput."""
    found: dict[Candidate, Answer] = {}
    for one in answers:
        known = found.get(one.candidate)
        if known is None or known.pruned:
            one.tried = [*(known.tried if known else []), *one.tried]
            found[one.candidate] = one
    return list(found.values())
