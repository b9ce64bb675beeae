"""Draws a plan: goodput over the ratio, attainment over the rate, utilisation, and what a smaller cluster
would cost in latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .candidates import Candidate
from .plan import Plan


def draw_plan(path: Path, plan: Plan) -> None:
    """Lines are sketched, points are simulated. A PNG."""
    figure = Figure((13, 9.5))
    (ratios, attainment), (front, busy) = figure.subplots(2, 2)
    if plan.goal.objective == "goodput":
        _goodput_over_ratio(ratios, plan)
    else:
        _value_over_ratio(ratios, plan)
    _attainment_over_rate(attainment, plan)
    _cost_against_latency(front, plan)
    _utilisation(busy, plan)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _goodput_over_ratio(axes: Axes, plan: Plan) -> None:
    words = plan.question.hardware.words
    best = plan.split.candidate
    splits = sorted(
        (c for c in plan.sketches if _same_kinds(c, best)), key=lambda c: c.prefill / c.num_workers
    )
    shares = [_share(c) for c in splits]
    axes.plot(shares, [plan.sketches[c] for c in splits], "-", color="tab:blue", label="sketched")
    bounds = [plan.question.bound(c) for c in splits]
    axes.plot(shares, bounds, "--", color="grey", label="bound from means")
    known = [a for a in plan.answers if _same_kinds(a.candidate, best) and not a.pruned and a.goodput > 0]
    at, goodputs = [_share(a.candidate) for a in known], [a.goodput for a in known]
    axes.plot(at, goodputs, "o", color="tab:blue", label="simulated")
    if goodput := plan.split.goodput:
        label = f"best split, {words(best)}"
        axes.plot([_share(best)], [goodput], "*", color="tab:blue", markersize=14, label=label)
    if plan.colocated.goodput:
        axes.axhline(plan.colocated.goodput, color="tab:orange", label=words(plan.colocated.candidate))
    if plan.best is not plan.split:
        axes.axhline(plan.best.goodput, color="tab:green", linestyle="--", label=words(plan.best.candidate))
    axes.set(xlabel="share of the workers that compute prompts", ylabel="goodput, requests/s", ylim=(0, None))
    axes.set_title("Goodput over the ratio")
    axes.legend(fontsize=8)


def _value_over_ratio(axes: Axes, plan: Plan) -> None:
    """Plot cost, or energy of a request, of each smallest cluster that serves the rate, by the sketch."""
    split = plan.split.candidate
    known = [c for c in plan.sketches if _same_kinds(c, split)]
    values = [-plan.goal.value(plan.question, c, plan.goal.rate) for c in known]
    axes.plot([_share(c) for c in known], values, "o", label="sketched")
    for one, colour in ((plan.split, "tab:blue"), (plan.colocated, "tab:orange")):
        if one.goodput >= plan.goal.rate:
            axes.axhline(-plan.value(one), color=colour, label=plan.question.hardware.words(one.candidate))
    unit = "price an hour" if plan.goal.objective == "cost" else "Wh a request"
    axes.set(xlabel="share of the workers that compute prompts", ylabel=unit, ylim=(0, None))
    axes.set_title(f"{plan.goal.objective.capitalize()} over the ratio, at {plan.goal.rate:.2f} requests/s")
    axes.legend(fontsize=8)


def _attainment_over_rate(axes: Axes, plan: Plan) -> None:
    for candidate, seen in plan.curves.items():
        label = plan.question.hardware.words(candidate)
        (line,) = axes.plot([g.rate for g in seen], [g.attainment for g in seen], "-", label=label)
        passed = [
            (rate, share)
            for one in plan.answers
            for rate, share in one.tried
            if one.candidate == candidate
            and share >= plan.question.level.attainment
            and rate <= seen[-1].rate
        ]
        axes.plot(*_columns(passed), "o", markersize=4, color=line.get_color())
    axes.axhline(plan.question.level.attainment, color="grey", linewidth=0.8)
    axes.set(xlabel="requests/s", ylabel="good requests", ylim=(0, 1.02), title="Attainment over the rate")
    axes.legend(fontsize=8)


def _cost_against_latency(axes: Axes, plan: Plan) -> None:
    """Each cluster of half to all of the workers (twice as many, for cost and energy) at four fifths of the
    best one's goodput; the line joins those that meet the bounds and that none beats in both."""
    hardware = plan.question.hardware
    priced = all(hardware.price_per_hour(c) is not None for c in plan.sizes)
    costs = [hardware.price_per_hour(c) or 0.0 if priced else float(hardware.num_gpus(c)) for c in plan.sizes]
    good, bad = list[tuple[float, float, str]](), list[tuple[float, float, str]]()
    for cost, (c, g) in zip(costs, plan.sizes.items(), strict=True):
        kept = good if g.attainment >= plan.question.level.attainment else bad
        kept.append((cost, 1e3 * g.ttft_p90_s, c.ratio))
    axes.plot(*_columns(good), "o", color="darkgrey")
    if bad:
        axes.plot(*_columns(bad), "x", color="darkgrey", label="misses the bounds")
        axes.legend(fontsize=8)
    front, least = list[tuple[float, float]](), float("inf")
    for x, y, ratio in sorted(good, key=lambda point: point[:2]):
        if y < least:
            front.append((x, y))
            least = y
            axes.annotate(ratio, (x, y), fontsize=7, xytext=(3, 4), textcoords="offset points")
    axes.plot(*_columns(front), "o-", color="tab:green")
    axes.set(xlabel="price an hour" if priced else "GPUs", ylabel="TTFT p90, ms (sketched)", yscale="log")
    at = "".join(f" at {g.rate:.2f} requests/s" for g in list(plan.sizes.values())[:1])
    axes.set_title(f"Cost against latency{at}")


def _utilisation(axes: Axes, plan: Plan) -> None:
    at = [
        (c, min(seen, key=lambda g: abs(g.rate - 0.9 * plan.at_goodput.rate)))
        for c, seen in plan.curves.items()
    ]
    at.sort(key=lambda pair: _share(pair[0]))
    for offset, role, color in (
        (-0.2, "prefill", "tab:blue"),
        (0.2, "decode", "tab:red"),
        (0.0, "colocated", "tab:orange"),
    ):
        bars = [(i + offset, g.busy[role]) for i, (_, g) in enumerate(at) if role in g.busy]
        axes.bar(*_columns(bars), 0.38, color=color, label=role)
    axes.set_xticks(range(len(at)), [plan.question.hardware.words(c) for c, _ in at], fontsize=7, rotation=20)
    axes.set(
        ylabel="busy", ylim=(0, 1.05), title=f"Utilisation at {0.9 * plan.at_goodput.rate:.2f} requests/s"
    )
    axes.legend(fontsize=8)


def _columns(points: Sequence[tuple[Any, ...]]) -> tuple[list[float], list[float]]:
    """The x and the y of points."""
    return [point[0] for point in points], [point[1] for point in points]


def _same_kinds(one: Candidate, best: Candidate) -> bool:
    return one.is_split and (one.prefill_kind, one.decode_kind) == (best.prefill_kind, best.decode_kind)


def _share(candidate: Candidate) -> float:
    return candidate.prefill / max(1, candidate.num_workers)
