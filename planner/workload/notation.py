"""How distributions of lengths are written in options; apart from what draws them, so that reading options
loads no numerical library."""

from __future__ import annotations

LENGTHS = r"^(\d+|(uniform|normal|lognormal):\d+(\.\d+)?,\d+(\.\d+)?)$"
"""``N``, ``uniform:LOW,HIGH``, ``normal:MEAN,DEVIATION`` or ``lognormal:MEDIAN,SIGMA``, in tokens."""
