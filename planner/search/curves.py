"""What a plan's plots show beside the recommended cluster, by the sketch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .candidates import Candidate
from .crew import Crew
from .looks import glance
from .plan import Plan


def add_curves(plan: Plan, crew: Crew, rate: float) -> None:
    """Add attainment over the rate of the ratios around the best."""
    split, shown = (
        plan.split.candidate,
        {plan.winner.candidate, plan.split.candidate, plan.colocated.candidate},
    )
    near = {c.shape: c for c in plan.sketches if c.is_split and abs(c.prefill - split.prefill) <= 3}
    near |= {c.shape: c for c in shown if c.num_workers}
    rates = [rate * share for share in (0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)]
    seen = iter(crew.ask(glance, [(c, r) for c in near.values() for r in rates]))
    plan.curves = {c: [next(seen) for _ in rates] for c in near.values()}


def add_sizes(plan: Plan, crew: Crew, rate: float) -> None:
    """Add what splits and colocated clusters of other sizes give at four fifths of the rate."""
    split = plan.split.candidate
    most = 1.0 if plan.goal.objective == "goodput" else 2.0
    others = *_other_sizes(split, most), *_other_colocated(plan.colocated.candidate, most)
    sizes = dict.fromkeys((*others, plan.winner.candidate))
    plan.sizes = dict(zip(sizes, crew.ask(glance, [(c, 0.8 * rate) for c in sizes]), strict=True))


def _other_sizes(split: Candidate, most: float) -> Iterable[Candidate]:
    """Clusters of half to ``most`` times the workers, in about this ratio."""
    own = split.prefill + split.decode
    for total in range(max(2, own // 2), int(most * own) + 1):
        middle = round(total * split.prefill / own)
        for prefill in range(max(1, middle - 1), min(total - 1, middle + 1) + 1):
            yield replace(split, prefill=prefill, decode=total - prefill)


def _other_colocated(colocated: Candidate, most: float) -> Iterable[Candidate]:
    """Half to ``most`` times these workers."""
    for total in range(max(1, colocated.colocated // 2), int(most * colocated.colocated) + 1):
        yield replace(colocated, colocated=total)
