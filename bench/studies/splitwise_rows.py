"""Results of the comparisons of Splitwise's cluster designs: as text, and drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Comparison = Literal["iso-power", "iso-cost", "iso-throughput"]


@dataclass
class Row:
    """What came out."""

    workload: str
    comparison: str
    design: str
    num_prompt: int
    num_token: int
    rate: float  # 0: none of the traces' rates is held
    price: float
    power: float
    missed_at_next: list[str] = field(default_factory=list)


def shown(rows: list[Row]) -> str:
    lines = [
        f"{'workload':9}{'comparison':16}{'design':17}{'prompt':>7}{'token':>6}{'rate/s':>8}{'price/h':>10}"
        f"{'power':>9}   next rate misses"
    ]
    for r in rows:
        missed = " ".join(r.missed_at_next)
        counts = f"{r.num_prompt:7}{r.num_token:6}{r.rate:8.0f}{r.price:10.0f}{r.power:9.0f}"
        lines.append(f"{r.workload:9}{r.comparison:16}{r.design:17}{counts}   {missed}")
    return "\n".join(lines)


def draw(path: Path, rows: list[Row]) -> None:
    """Rates for equal budgets; price and power for an equal rate. A PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys((r.workload, r.comparison) for r in rows))
    columns = len({comparison for _, comparison in groups})
    lines = len({workload for workload, _ in groups})
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.8 * lines), squeeze=False)
    for axis, (workload, comparison) in zip(axes.flat, groups, strict=True):
        of = [r for r in rows if (r.workload, r.comparison) == (workload, comparison)]
        labels = [
            f"{r.design.replace('Splitwise-', '').replace('Baseline-', 'base ')}\n"
            f"{r.num_prompt}+{r.num_token}"
            for r in of
        ]
        if comparison == "iso-throughput":
            axis.bar(
                [i - 0.2 for i in range(len(of))], [r.price / of[0].price for r in of], 0.4, label="price"
            )
            axis.bar(
                [i + 0.2 for i in range(len(of))], [r.power / of[0].power for r in of], 0.4, label="power"
            )
            axis.set_ylabel(f"of {of[0].design}")
            axis.legend(fontsize=7)
        else:
            axis.bar(range(len(of)), [r.rate for r in of])
            axis.set_ylabel("requests/s within all nine")
        axis.set_xticks(range(len(of)), labels, fontsize=6)
        axis.set_title(f"{workload}, {comparison}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
