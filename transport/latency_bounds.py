"""Bounds on latency as people write them: ``ttft=0.5,tpot=0.05@p90`` or ``ttft=0.5@p90,tpot=0.05@p90``.

The planner, the pool controller and the dashboard read this one notation.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PERCENT = 90.0


@dataclass(frozen=True, slots=True)
class LatencyBound:
    """``seconds`` that a ``share`` of the requests must keep; ``share`` is None where no percentile was
    given."""

    seconds: float
    share: float | None


def notation(*names: str) -> str:
    """Return the regular expression of bounds with these names; it also matches the empty text."""
    bound = rf"({'|'.join(names)})=\d*\.?\d+(@p\d+(\.\d+)?)?"
    return rf"^$|^{bound}(,{bound})*$"


def parse_bounds(text: str) -> dict[str, LatencyBound]:
    """Return the bounds by name; ``text`` matches ``notation``. Raises ValueError."""
    bounds: dict[str, LatencyBound] = {}
    for part in text.split(",") if text else []:
        name, _, value = part.partition("=")
        seconds, _, percent = value.partition("@p")
        if name in bounds:
            raise ValueError(f"names {name} twice")
        if percent and not 0 < float(percent) < 100:
            raise ValueError("a percentile lies between p0 and p100, as in ttft=0.5@p90")
        bounds[name] = LatencyBound(float(seconds), float(percent) / 100 if percent else None)
    return bounds


def attainment(bounds: dict[str, LatencyBound]) -> float:
    """Return the share of requests that must keep all bounds at once: the largest share given for any of
    them."""
    return max(
        (bound.share for bound in bounds.values() if bound.share is not None), default=DEFAULT_PERCENT / 100
    )
