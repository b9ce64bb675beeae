"""The search: which cluster meets the goal best, by how much, and against what.

Hundreds of candidates are sketched, best bound first, each only as far as it can still beat the best one
known. The few that the sketch puts in front are bisected; so are the best one's neighbours and the same
hardware colocated: by the simulator, unless the sketch decides as it does. All percentiles are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

from ..errors import SimulationError
from .candidates import Candidate
from .crew import Crew, crew, so_far
from .curves import add_curves, add_sizes
from .goal import Goal, energy_wh, joined, mixtures, settings_of, shapes
from .goodput import Answer, Question, answer, sketched_goodput
from .looks import by_chance, glance, if_slower, look
from .plan import GROWTH, Growth, Means, Plan
from .smallest import least_more, smallest, smallest_that_serve

NEARLY = 0.93
"""A candidate whose sketch is this near to the best one's is simulated too."""
MOST_RIVALS = 3
LIVES_TO_SETTLE = 20
"""Repetitions of the load for figures of the long run."""
KINDS: tuple[Callable[[Candidate], bool], ...] = (
    lambda c: c.is_split,
    lambda c: c.prefill > 0 and c.colocated > 0,
    lambda c: not c.prefill,
)
"""Pure splits, splits with colocated workers, colocated workers alone."""
NOTHING = Answer(Candidate(0, 0, 0, 1, 1), 0.0)
"""The answer without candidates."""
Report = Callable[[str], None]


def search(
    question: Question, goal: Goal, processes: int, report: Report = lambda _: None, with_curves: bool = False
) -> Plan:
    """Search for the plan. ``report`` gets a sentence for each stage. Raises SimulationError if nothing can
    be built."""
    with crew(question, processes) as workers:
        begun = _Search(question, goal, workers, report)
        try:
            return begun.run(with_curves)
        except KeyboardInterrupt:
            raise so_far(question, goal, begun.known.values(), begun.best_sketched.values()) from None


def best_sketched(question: Question, goal: Goal, processes: int) -> float:
    """The highest goodput that the sketch finds."""
    with crew(question, processes) as workers:
        return max(_Search(question, goal, workers, print).sketched().values(), default=0.0)


class _Search:
    """What the stages share."""

    def __init__(self, question: Question, goal: Goal, workers: Crew, report: Report) -> None:
        self._question, self._goal, self._crew, self._report = question, goal, workers, report
        self.known: dict[Candidate, Answer] = {}
        self.best_sketched: dict[Candidate, tuple[float, Candidate]] = {}  # by shape

    def run(self, with_curves: bool) -> Plan:
        self._report("sketching")
        goal = self._goal
        if goal.objective == "goodput":
            sketches = self.sketched()
        else:  # pools of several kinds where no other ones serve the rate
            sketches = smallest_that_serve(self._question, goal, self._crew) or {
                c: goal.rate for c, goodput in self.sketched().items() if goodput >= goal.rate
            }
        families = self._families(sketches)
        if not families:
            raise SimulationError(
                "within these limits nothing can be built that could serve the load: allow more "
                "GPUs, a higher price or more watts"
            )
        self._report("simulating the best ones")
        self._simulate(families, sketches)
        *_, winner = self._best_ones()
        self._report(f"{winner.candidate.ratio}: its neighbours")
        around = self._around(winner.candidate)
        guesses = self._guesses(around, sketches)
        neighbours = self._answer(
            [(c, 0.0, guess) for c, guess in zip(around, guesses, strict=True)], fresh=False
        )
        split, best, colocated, winner = self._best_ones()
        rate = winner.goodput or winner.bound / 10
        self._report(f"{winner.candidate.ratio}: how much of this is chance, and half as much load again")
        of_goodput = self._goal.objective == "goodput"
        grown_rate = GROWTH * (rate if of_goodput else self._goal.rate)
        relaxed_rate = 0.8 * rate if of_goodput else self._goal.rate
        of_means, expected = self._from_means(sketches)
        # these take the longest
        others = [self._crew.begin(by_chance, winner.candidate, rate, which) for which in (1, 2)]
        slower = self._crew.begin(if_slower, winner.candidate, rate)
        looks = [
            self._crew.begin(look, *asked)
            for asked in ((winner.candidate, rate), (winner.candidate, relaxed_rate), (of_means, expected))
        ]
        grown = least_more(self._question, self._crew, winner.candidate, grown_rate)
        unchanged = glance(self._question, winner.candidate, grown_rate)
        at_goodput, relaxed, means = (one() for one in looks)
        plan = Plan(
            self._question,
            self._goal,
            split,
            best,
            colocated,
            list(self.known.values()),
            [a for a in neighbours if a is not winner],
            sketches,
            at_goodput,
            relaxed,
            [one() for one in others],
            Growth(*grown, unchanged.attainment),
            Means(of_means, expected, means.tallies.attainment),
            energy_wh(self._question, winner.candidate, relaxed_rate),
            slower(),
        )
        if plan.is_short(winner):
            times = ceil(LIVES_TO_SETTLE * plan.life_s * winner.goodput / len(self._question.load.requests))
            plan.sustained = min(
                winner.goodput, sketched_goodput(self._question.repeated(times), winner.candidate)
            )
        add_sizes(plan, self._crew, rate)
        if with_curves:
            self._report("curves")
            add_curves(plan, self._crew, rate)
        return plan

    def _value(self, candidate: Candidate, goodput: float) -> float:
        return self._goal.value(self._question, candidate, goodput)

    def _value_of(self, one: Answer) -> float:
        return self._value(one.candidate, one.goodput)

    # --- the sketch ------------------------------------------------------------------------------

    def sketched(self) -> dict[Candidate, float]:
        """The goodput of each shape at its best settings, by the sketch; then of mixtures around the best
        split."""
        found = self._best_settings(shapes(self._question.hardware, self._goal.limits))
        splits = {c: goodput for c, goodput in found.items() if c.prefill}
        if splits:
            found |= self._best_settings(mixtures(max(splits, key=lambda c: splits[c])))
        for kind in KINDS:
            self._join_others(found, kind)
        return found

    def _join_others(self, found: dict[Candidate, float], kind: Callable[[Candidate], bool]) -> None:
        """Add clusters whose pools have workers of several kinds: from the best one on, as long as the next
        one is better."""
        hardware, limits = self._question.hardware, self._goal.limits
        best = max(filter(kind, found), key=lambda c: found[c], default=None)
        while best is not None and len(hardware.kinds) > 1:
            tried = self._best_settings(joined(hardware, limits, best), found[best])
            before, best = found[best], max(tried, key=lambda c: tried[c], default=None)
            if best is None or tried[best] <= before:
                break
            found |= {c: goodput for c, goodput in tried.items() if goodput > before}

    def _best_settings(self, tried: Iterable[Candidate], floor: float = 0.0) -> dict[Candidate, float]:
        """Sketch shapes within the limits, best bound first: of each what beats its best settings known, and
        ``floor``."""
        hold, hardware = self._goal.limits.hold, self._question.hardware
        built = [shape for shape in tried if hold(shape, hardware)]
        candidates = [one for shape in built for one in settings_of(self._question, self._goal, shape)]
        waiting = sorted(candidates, key=self._question.bound, reverse=True)
        best = dict[Candidate, tuple[float, Candidate]]()
        at_once = 4 * self._crew.num_processes
        while waiting:
            now, waiting = waiting[:at_once], waiting[at_once:]
            known = [best[c.shape][0] if c.shape in best else floor for c in now]
            goodputs = self._crew.ask(sketched_goodput, zip(now, known, strict=True))
            for one, goodput in zip(now, goodputs, strict=True):
                shape = one.shape
                if goodput > best.get(shape, (0.0, one))[0] or shape not in best:
                    best[shape] = self.best_sketched[shape] = (goodput, one)
        return {one: goodput for goodput, one in best.values()}

    def _families(self, sketches: dict[Candidate, float]) -> list[list[Candidate]]:
        """The families of candidates, each with its best one first: pure splits, splits with colocated
        workers, colocated ones."""
        split, partly, together = (
            _in_front((c for c in sketches if kind(c)), sketches, self._value) for kind in KINDS
        )
        if (
            split
            and partly
            and self._value(partly[0], sketches[partly[0]]) <= self._value(split[0], sketches[split[0]])
        ):
            split, partly = _in_front([*split, *partly], sketches, self._value), []
        return [one for one in (split, partly, together) if one]

    def _best_ones(self) -> tuple[Answer, Answer, Answer, Answer]:
        """The best simulated ones: pure split, with disaggregation, colocated, of all."""
        split, partly, together = (
            max((a for a in self.known.values() if kind(a.candidate)), key=self._value_of, default=NOTHING)
            for kind in KINDS
        )
        best = max((split, partly), key=self._value_of)
        return split, best, together, max((best, together), key=self._value_of)

    # --- the simulator ---------------------------------------------------------------------------

    def _answer(self, asked: list[tuple[Candidate, float, float]], fresh: bool = True) -> list[Answer]:
        """Unless ``fresh``, what is known already is not tried again, but of a rival that was pruned no
        goodput is known."""
        new = [one for one in asked if fresh or one[0] not in self.known or self.known[one[0]].pruned]
        for one in self._crew.ask(answer, new):
            earlier = self.known.get(one.candidate)
            if earlier is not None:
                one.tried = [*earlier.tried, *one.tried]
            if earlier is None or not one.pruned:
                self.known[one.candidate] = one
        return [self.known[candidate] for candidate, _, _ in asked]

    def _simulate(self, families: list[list[Candidate]], sketches: dict[Candidate, float]) -> None:
        """Simulate the first of each family and its rivals. For a given rate: the first that serves it, by
        cost."""
        if self._goal.objective != "goodput":
            for family in families:
                smallest(self._question, self._goal, family, self._crew, self.known)
            return
        leads = self._answer([(family[0], 0.0, sketches[family[0]]) for family in families])
        rivals = [
            (rival, lead.goodput, sketches[rival])
            for lead, family in zip(leads, families, strict=True)
            for rival in [c for c in family[1:] if sketches[c] >= NEARLY * sketches[lead.candidate]][
                :MOST_RIVALS
            ]
        ]
        self._answer(rivals)

    def _guesses(self, candidates: list[Candidate], sketches: dict[Candidate, float]) -> list[float]:
        """The sketch's goodput of each, also of settings with which its shape was not at its best: a sketch
        costs a hundredth of the simulations that a search without a guess begins with."""
        known = {c: sketches[c] for c in candidates if sketches.get(c)}
        lacking = [c for c in candidates if c not in known]
        known |= zip(lacking, self._crew.ask(sketched_goodput, [(c, 0.0) for c in lacking]), strict=True)
        return [known[c] for c in candidates]

    def _around(self, candidate: Candidate) -> list[Candidate]:
        if self._goal.objective == "goodput":
            around = [candidate.moved(-1), candidate.moved(1)]
        else:
            around = (
                [candidate.with_more(prefill=-1), candidate.with_more(decode=-1)]
                if candidate.prefill
                else [candidate.with_more(-1)]
            )
        hold = self._goal.limits.hold
        return [c for c in around if c is not None and c.is_whole and hold(c, self._question.hardware)]

    def _from_means(self, sketches: dict[Candidate, float]) -> tuple[Candidate, float]:
        """What a plan from means would build, and the rate that it would expect."""
        splits = [c for c in sketches if c.is_split] or list(sketches)
        chosen = max(splits, key=lambda c: self._value(c, self._question.bound(c)))
        return chosen, self._question.bound(chosen)


def _in_front(
    candidates: Iterable[Candidate],
    sketches: dict[Candidate, float],
    value: Callable[[Candidate, float], float],
) -> list[Candidate]:
    return sorted(candidates, key=lambda c: value(c, sketches[c]), reverse=True)
