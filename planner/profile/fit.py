"""Fits a step model to measured steps: least squares of relative errors. Pure.

    seconds = curve (a sum of hat functions over the knots)
              + read_s * reads + seq_s * seqs + cached_s * cached

Slopes are left out where the data would make them negative: nothing gets quicker by more work of that kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...engine.latency_profile import HandoffModel, Piece, Residuals, StepModel

Columns = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured kind of step."""

    units: float
    reads: float
    seqs: float
    seconds: float
    cached: float = 0.0


def fit_steps(
    points: Sequence[StepPoint],
    knots: Sequence[float],
    extras: Sequence[str] = ("read_s", "seq_s", "cached_s"),
) -> StepModel:
    """``knots``: units at which the curve may bend; those without a point near them are left out. ``extras``:
    the slopes that the points can separate from the curve."""
    assert points, "nothing was measured"
    units = np.array([p.units for p in points])
    seconds = np.array([p.seconds for p in points])
    used = _supported(np.unique(np.asarray(knots, float)), units)
    columns = {"read_s": np.array([p.reads for p in points]), "seq_s": np.array([p.seqs for p in points])}
    columns["cached_s"] = np.array([p.cached for p in points])
    chosen = [name for name in extras if np.ptp(columns[name]) > 0]
    heights, slopes = _curve_and_slopes(_hats(units, used), columns, chosen, seconds)
    curve = tuple(zip(used.tolist(), np.maximum(heights, 0.0).tolist(), strict=True))
    piece = Piece(curve=curve, **slopes)
    quantities = {
        "units": units,
        "reads": columns["read_s"],
        "seqs": columns["seq_s"],
        "cached": columns["cached_s"],
    }
    ranges = {name: _range(values) for name, values in quantities.items()}
    model = StepModel(pieces=(piece,), ranges=ranges)  # type: ignore[arg-type]
    return model.model_copy(update={"residuals": residuals(model, points)})


def residuals(model: StepModel, points: Sequence[StepPoint]) -> Residuals:
    """Relative errors of the model at these points."""
    return relative_residuals(
        [(model.seconds(p.units, p.reads, p.seqs, p.cached), p.seconds) for p in points]
    )


@dataclass(frozen=True, slots=True)
class PutPoint:
    """Measured puts, one after the other: ``num_bytes`` of all of them, ``num_slices``: for each put, the
    blocks of which it took some layers only."""

    num_bytes: int
    num_puts: int
    num_slices: int
    seconds: float


def fit_puts(points: Sequence[PutPoint]) -> HandoffModel:
    """A mover's ``put_s``, ``slice_s``, ``bytes_per_s`` and ``join_s``; the other fields are the model's
    defaults. What the bytes of a transfer take is a curve over them, since small ones stay in caches; its
    slope from end to end gives ``bytes_per_s``, and what it has at its beginning beside that, once a
    transfer, ``join_s``. Of points of at least two sizes, in some of which there are more puts."""
    sizes = np.array([float(p.num_bytes) for p in points])
    knots, seconds = np.unique(sizes), np.array([p.seconds for p in points])
    columns = {
        "puts": np.array([float(p.num_puts) for p in points]),
        "slices": np.array([float(p.num_slices) for p in points]),
    }
    heights, slopes = _curve_and_slopes(_hats(sizes, knots), columns, list(columns), seconds)
    rate = float((knots[-1] - knots[0]) / max(heights[-1] - heights[0], 1e-9))
    put_s, slice_s = slopes.get("puts", 0.0), slopes.get("slices", 0.0)
    join_s = max(0.0, float(heights[0] - knots[0] / rate))
    modelled = [p.num_puts * put_s + p.num_slices * slice_s + p.num_bytes / rate + join_s for p in points]
    pairs = list(zip(modelled, seconds.tolist(), strict=True))
    return HandoffModel(
        put_s=put_s, slice_s=slice_s, bytes_per_s=rate, join_s=join_s, residuals=relative_residuals(pairs)
    )


def _curve_and_slopes(
    hats: Columns, columns: dict[str, Columns], names: list[str], seconds: Columns
) -> tuple[Columns, dict[str, float]]:
    """The curve's heights, and the slopes of those columns that do not come out negative."""
    chosen, count = list(names), hats.shape[1]
    while True:
        solution = _relative_least_squares(
            np.column_stack([hats, *(columns[name] for name in chosen)]), seconds
        )
        slopes = dict(zip(chosen, solution[count:].tolist(), strict=True))
        negative = min(slopes, key=lambda name: slopes[name] * float(columns[name].max()), default=None)
        if negative is None or slopes[negative] >= 0:
            return solution[:count], slopes
        chosen.remove(negative)


def relative_residuals(pairs: Sequence[tuple[float, float]]) -> Residuals:
    """Relative errors of pairs (modelled, measured) in any unit."""
    errors = np.array([abs(modelled - measured) / measured for modelled, measured in pairs])
    return Residuals(
        num_points=len(pairs),
        mean=float(errors.mean()),
        p95=float(np.percentile(errors, 95)),
        worst=float(errors.max()),
    )


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
