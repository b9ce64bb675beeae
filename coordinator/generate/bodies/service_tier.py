"""OpenAI's ``service_tier`` in our priority classes: a request may ask for less than its key's class, never for more."""

from __future__ import annotations

from typing import Literal

from ...lifecycle.request import PriorityClass

ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
ASKED: dict[ServiceTier, PriorityClass] = {"priority": "premium", "default": "standard", "flex": "batch"}
"""The others ask for nothing but the key's own class."""
TOLD: dict[PriorityClass, ServiceTier] = {"premium": "priority", "standard": "default", "free": "default", "batch": "flex"}
_RANKS: dict[PriorityClass, int] = {"premium": 0, "standard": 1, "free": 2, "batch": 3}


def class_in_force(tier: ServiceTier | None, own: PriorityClass) -> PriorityClass:
    """Where a request is scheduled whose key has the class ``own``: OpenAI's API, too, goes down rather than refuse."""
    if tier is None:
        return own
    return max(own, ASKED.get(tier, own), key=_RANKS.__getitem__)
