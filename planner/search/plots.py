"""Draws a plan: goodput over the ratio, attainment over the rate."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from .plan import Plan


def draw_plan(path: Path, plan: Plan) -> None:
    """Left: goodput by prefill workers (hollow: not better than the best known when it was tried, so only bounded); right: attainment
    of every rate that was tried. A PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    apart = sorted((a for a in plan.answers if not a.candidate.colocated), key=lambda a: a.candidate.prefill)
    known = [a for a in apart if not a.pruned]
    left.plot([a.candidate.prefill for a in known], [a.goodput for a in known], "o", label="simulated")
    left.plot([a.candidate.prefill for a in apart], [a.bound for a in apart], "--", color="grey", label="bound from means")
    left.axhline(plan.colocated.goodput, color="tab:orange", label=plan.colocated.candidate.ratio)
    left.set(xlabel=f"prefill workers of {plan.best.candidate.num_workers}", ylabel="goodput, requests/s", ylim=(0, None))
    left.legend()
    for one in [*known, plan.colocated]:
        tried = sorted(one.tried)
        right.plot([rate for rate, _ in tried], [attainment for _, attainment in tried], "o-", markersize=3, label=one.candidate.ratio)
    right.axhline(plan.question.level.attainment, color="grey", linewidth=0.8)
    right.set(xlabel="requests/s", ylabel="attainment (below the line: at most)", ylim=(0, 1.02))
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
