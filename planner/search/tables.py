"""The figures behind a plan's recommendation: its rates, each by what it is, and other clusters."""

from __future__ import annotations

from operator import le

from rich.table import Table

from ...traces.console import figures_table
from .candidates import Candidate
from .goodput import LOWEST
from .looks import Glance, Look
from .plan import GROWTH, Plan
from .verdict import compared
from .words import about

TIMES = ("ttft", "tpot", "e2e")


def rates_table(plan: Plan) -> Table:
    """The recommended cluster's rates, the planned requests' with the latencies there. Steps are slower by
    the profile's mean errors."""
    winner, orders = plan.winner, plan.others
    table = figures_table("Recommended; p90 in ms", "requests/s", "good", *map(str.upper, TIMES))
    table.add_row("most that it serves", f"{winner.goodput:.2f}", *_cells(plan.at_goodput))
    if orders:
        how = "each half" if plan.question.load.is_tied else "lengths in other orders"
        known = [winner.goodput, *(goodput for goodput, _ in orders)]
        lowest = f"{min(known):.2f}" if min(known) > 0 else f"less than {winner.bound / LOWEST:.2f}"
        table.add_row(f"most, {how}", f"{lowest} to {max(known):.2f}")
    if plan.sustained is not None:
        table.add_row("most, over and over", about(plan, plan.sustained))
    if plan.whole is not None:
        table.add_row(f"most, {plan.whole[0]:,} of the trace", about(plan, plan.whole[1]))
    if plan.if_slower is not None:
        errors = plan.question.hardware.fit_errors(winner.candidate)
        known_errors = ", ".join(f"{error:.1%}" for error in errors if error is not None)
        slower = f"{plan.if_slower:.2f}" if plan.if_slower > 0 else f"less than {winner.bound / LOWEST:.2f}"
        table.add_row(f"most, steps {known_errors} slower", slower)
    eased = "four fifths of the most" if plan.goal.objective == "goodput" else "the rate asked for"
    table.add_row(eased, f"{plan.relaxed.rate:.2f}", *_cells(plan.relaxed))
    table.add_row(f"{GROWTH - 1:.0%} more load", f"{_grown(plan):.2f}", f"{plan.growth.unchanged:.1%}")
    return table


def clusters_table(plan: Plan) -> Table:
    """Those that were held against the recommended one."""
    words = plan.question.hardware.words
    table = figures_table("Other clusters", "", words=2)
    for a in plan.neighbours:
        table.add_row(f"neighbour {words(a.candidate)}", compared(plan, a))
    good = (a for a in plan.answers if not a.pruned and a.goodput > 0)
    mixed = (a for a in good if a.candidate.prefill and a.candidate.colocated)
    best = max(mixed, key=lambda a: a.goodput, default=None)
    if best is not None and best is not plan.winner and best not in plan.neighbours:
        table.add_row(f"partly colocated {words(best.candidate)}", compared(plan, best))
    means = plan.means
    expected = f"expects {means.expected:.2f} requests/s, where {means.attainment:.1%} are good"
    table.add_row(f"from means {words(means.candidate)}", expected)
    table.add_row(*_for_growth(plan))
    return table


def pareto(plan: Plan) -> list[tuple[Candidate, Glance]]:
    """The clusters that meet the bounds and that no other one beats, the smallest first."""
    hardware = plan.question.hardware
    good = {
        c: (hardware.num_gpus(c), seen.ttft_p90_s, seen.tpot_p90_s)
        for c, seen in plan.sizes.items()
        if seen.attainment >= plan.question.level.attainment
    }
    best = [
        c
        for c, values in good.items()
        if not any(other != values and all(map(le, other, values)) for other in good.values())
    ]
    return [(c, plan.sizes[c]) for c in sorted(best, key=lambda c: good[c])]


def pareto_table(plan: Plan) -> Table | None:
    """None where no other size meets the bounds."""
    rows, hardware = pareto(plan), plan.question.hardware
    if not rows:
        return None
    priced = all(kind.price_per_hour is not None for kind in hardware.kinds)
    costs = ["an hour"] if priced else []
    title = f"Not beaten by splits or colocated at {rows[0][1].rate:.2f}/s"
    table = figures_table(title, "GPUs", *costs, "TTFT p90 ms", "TPOT p90 ms", "Wh a request")
    for candidate, seen in rows:
        price = [f"{hardware.price_per_hour(candidate):.2f}"] if priced else []
        energy = "" if seen.energy_wh is None else f"{seen.energy_wh:.3g}"
        times = [f"{1e3 * seen.ttft_p90_s:.0f}", f"{1e3 * seen.tpot_p90_s:.1f}"]
        table.add_row(hardware.words(candidate), str(hardware.num_gpus(candidate)), *price, *times, energy)
    return table


def _cells(seen: Look) -> list[str]:
    """The share of good requests, and times in milliseconds."""
    of = seen.tallies.percentiles((90,))
    times = (f"{1e3 * of[name]['p90']:,.0f}" if name in of else "-" for name in TIMES)
    return [f"{seen.tallies.attainment:.1%}", *times]


def _grown(plan: Plan) -> float:
    return GROWTH * (plan.winner.goodput if plan.goal.objective == "goodput" else plan.goal.rate)


def _for_growth(plan: Plan) -> tuple[str, str]:
    """The cluster for ``GROWTH`` times the load, and what is expected of it."""
    growth, winner, hardware = plan.growth, plan.winner, plan.question.hardware
    what, good = f"for {GROWTH - 1:.0%} more load", f"{growth.attainment:.1%} are good"
    enough = growth.unchanged >= plan.question.level.attainment
    if enough and winner.bound >= _grown(plan):
        short = plan.goal.objective == "goodput"
        return what, "too short a load: plan on more requests" if short else "the recommended one does"
    if enough:
        good += f"; the recommended one keeps up with {winner.bound:.2f}/s for long"
    more = hardware.num_gpus(growth.candidate) - hardware.num_gpus(winner.candidate)
    if growth.attainment < plan.question.level.attainment:
        good += ", still not enough: plan again with more GPUs"
    return f"{what} {hardware.words(growth.candidate)}", f"{more} GPU{'' if more == 1 else 's'} more: {good}"
