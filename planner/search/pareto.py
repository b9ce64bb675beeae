"""Clusters of other sizes that no other beats in GPUs, TTFT and TPOT at once, as a table."""

from __future__ import annotations

from rich import box
from rich.table import Column, Table

from .candidates import Candidate
from .looks import Glance
from .plan import Plan


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
        if not any(
            other != values and all(a <= b for a, b in zip(other, values, strict=True))
            for other in good.values()
        )
    ]
    return [(c, plan.sizes[c]) for c in sorted(best, key=lambda c: good[c])]


def pareto_table(plan: Plan) -> Table | None:
    """None where no other size meets the bounds."""
    rows, hardware = pareto(plan), plan.question.hardware
    if not rows:
        return None
    priced = all(kind.price_per_hour is not None for kind in hardware.kinds)
    right = ["GPUs", *(["an hour"] if priced else []), "TTFT p90 ms", "TPOT p90 ms", "Wh a request"]
    table = Table(
        "cluster",
        *(Column(name, justify="right") for name in right),
        box=box.SIMPLE,
        title=f"Sketched at {rows[0][1].rate:.2f} requests/s: no other cluster is better in all columns",
        title_justify="left",
    )
    for candidate, seen in rows:
        price = [f"{hardware.price_per_hour(candidate):.2f}"] if priced else []
        energy = "" if seen.energy_wh is None else f"{seen.energy_wh:.2f}"
        times = [f"{1e3 * seen.ttft_p90_s:.0f}", f"{1e3 * seen.tpot_p90_s:.1f}"]
        table.add_row(hardware.words(candidate), str(hardware.num_gpus(candidate)), *price, *times, energy)
    return table
