"""Fits a step model to measured steps: least squares of relative errors. Pure.

    seconds = sum of hat functions over the knots (the curve) + read_s * reads + seq_s * seqs + cached_s * cached

Slopes are left out where the data would make them negative: nothing gets quicker by more work of that kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...engine.latency_profile import Piece, Residuals, StepModel

Columns = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured kind of step."""

    units: float
    reads: float
    seqs: float
    seconds: float
    cached: float = 0.0


def fit_steps(points: Sequence[StepPoint], knots: Sequence[float], extras: Sequence[str] = ("read_s", "seq_s", "cached_s")) -> StepModel:
    """``knots``: units at which the curve may bend; those without a point near them are left out. ``extras``: which slopes the points can
    tell apart from the curve."""
    assert points, "nothing was measured"
    units = np.array([p.units for p in points])
    seconds = np.array([p.seconds for p in points])
    used = _supported(np.unique(np.asarray(knots, float)), units)
    columns = {"read_s": np.array([p.reads for p in points]), "seq_s": np.array([p.seqs for p in points])}
    columns["cached_s"] = np.array([p.cached for p in points])
    chosen = [name for name in extras if np.ptp(columns[name]) > 0]
    while True:
        matrix = np.column_stack([_hats(units, used), *(columns[name] for name in chosen)])
        solution = _relative_least_squares(matrix, seconds)
        slopes = dict(zip(chosen, solution[len(used) :].tolist(), strict=True))
        negative = min(slopes, key=lambda name: slopes[name] * float(columns[name].max()), default=None)
        if negative is None or slopes[negative] >= 0:
            break
        chosen.remove(negative)
    curve = tuple(zip(used.tolist(), np.maximum(solution[: len(used)], 0.0).tolist(), strict=True))
    piece = Piece(curve=curve, **slopes)
    quantities = {"units": units, "reads": columns["read_s"], "seqs": columns["seq_s"], "cached": columns["cached_s"]}
    ranges = {name: _range(values) for name, values in quantities.items()}
    model = StepModel(pieces=(piece,), ranges=ranges)  # type: ignore[arg-type]
    return model.model_copy(update={"residuals": residuals(model, points)})


def residuals(model: StepModel, points: Sequence[StepPoint]) -> Residuals:
    """Relative errors of the model at these points."""
    errors = np.array([abs(model.seconds(p.units, p.reads, p.seqs, p.cached) - p.seconds) / p.seconds for p in points])
    return Residuals(num_points=len(points), mean=float(errors.mean()), p95=float(np.percentile(errors, 95)), worst=float(errors.max()))


def _supported(knots: Columns, units: Columns) -> Columns:
    """Those with points on both sides or at them, so that every height is determined."""
    kept = knots[(knots >= units.min()) & (knots <= units.max())]
    return kept if len(kept) else np.array([float(np.median(units))])


def _hats(units: Columns, knots: Columns) -> Columns:
    """[num_points, num_knots]: the weight of each knot's height in the curve at each point."""
    if len(knots) == 1:
        return np.ones((len(units), 1))
    i = np.clip(np.searchsorted(knots, units, side="right"), 1, len(knots) - 1)
    share = (units - knots[i - 1]) / (knots[i] - knots[i - 1])
    hats = np.zeros((len(units), len(knots)))
    rows = np.arange(len(units))
    hats[rows, i - 1], hats[rows, i] = 1 - share, share
    return hats


def _relative_least_squares(matrix: Columns, seconds: Columns) -> Columns:
    weighted = matrix / seconds[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    solution: Columns = np.linalg.lstsq(weighted / scale, np.ones(len(seconds)), rcond=None)[0] / scale
    return solution


def _range(values: Columns) -> tuple[float, float]:
    return float(values.min()), float(values.max())
