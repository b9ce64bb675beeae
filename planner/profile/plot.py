"""Draws a fit against its points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...engine.latency_profile import Profile, StepModel, StepRole
from .measure import Repeats


def draw_fit(path: Path, profile: Profile, found: Sequence[Repeats], notes: Sequence[str] = ()) -> None:
    """Above: the notes, time over size, one line a context; below: measured over modelled. Writes a PNG."""
    figure = Figure((12, 9))
    axes = figure.subplots(2, 2)
    roles: tuple[tuple[StepRole, StepModel, str], ...] = (
        ("prefill", profile.prefill, "new tokens in the step"),
        ("decode", profile.decode, "sequences in the step"),
    )
    for column, (role, model, label) in enumerate(roles):
        of_role = [repeats for repeats in found if repeats.experiment.role == role]
        _times(axes[0][column], model, of_role)
        axes[0][column].set(title=f"{role} step", xlabel=label, ylabel="seconds", xscale="log", yscale="log")
        _ratios(axes[1][column], model, of_role)
        axes[1][column].set(xlabel="modelled seconds", ylabel="measured / modelled", xscale="log")
        axes[1][column].axhline(1.0, color="grey", linewidth=0.8)
    figure.suptitle("\n".join([profile.name, *notes]), fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _times(axes: Axes, model: StepModel, found: Sequence[Repeats]) -> None:
    reads = sorted({r.experiment.reads / r.experiment.units for r in found})
    shades = colormaps["viridis"]
    for r in found:
        e = r.experiment
        shade = shades(reads.index(e.reads / e.units) / max(1, len(reads) - 1))
        axes.plot(e.units, r.seconds, "x" if e.held_out else "o", color=shade, markersize=4)
        axes.plot(
            e.units,
            model.seconds(e.units, e.reads, len(e.sequences), e.cached),
            "_",
            color=shade,
            markersize=10,
        )


def _ratios(axes: Axes, model: StepModel, found: Sequence[Repeats]) -> None:
    for held_out, mark, label in ((False, "o", "fitted"), (True, "x", "held out")):
        chosen = [r for r in found if r.experiment.held_out is held_out]
        modelled = [
            model.seconds(e.units, e.reads, len(e.sequences), e.cached)
            for e in (r.experiment for r in chosen)
        ]
        axes.plot(
            modelled,
            [r.seconds / m for r, m in zip(chosen, modelled, strict=True)],
            mark,
            markersize=4,
            label=label,
        )
    axes.legend()
