"""The notation of length distributions in options. Free of numerical libraries, so that options load
quickly."""

from __future__ import annotations

LENGTHS = r"^(\d+|(uniform|normal|lognormal):\d+(\.\d+)?,\d+(\.\d+)?)$"
"""``N``, ``uniform:LOW,HIGH``, ``normal:MEAN,DEVIATION`` or ``lognormal:MEDIAN,SIGMA``, in tokens."""
