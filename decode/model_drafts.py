"""What the model's prediction layer has drafted of one sequence, and how often it is right. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

FIRST_RATE = 0.8
"""DeepSeek-V3 (arXiv 2412.19437, 5.4.3): 0.85 to 0.9 of first drafted tokens are right; later ones less."""
WEIGHT = 1 / 8
FORGOTTEN = 512
"""Tokens in which a measured rate goes most of the way back to ``FIRST_RATE``: so a sequence whose drafts
were wrong is tried again about every 30 tokens, which costs it under a percent."""


class ModelDrafts:
    """``tokens``: drafted behind the newest token, by the step that has sampled it; else empty."""

    __slots__ = ("_measured", "_num_outputs", "tokens")

    def __init__(self, num_outputs: int) -> None:
        """``num_outputs``: of the sequence so far."""
        self.tokens: list[int] = []
        self._measured, self._num_outputs = FIRST_RATE, num_outputs

    def keep(self, tokens: list[int], num_outputs: int) -> None:
        """These follow the newest of ``num_outputs`` tokens."""
        self._measured, self._num_outputs = self.rate(num_outputs), num_outputs
        self.tokens = tokens

    def take(self) -> list[int]:
        """Return the tokens, which are then gone."""
        tokens, self.tokens = self.tokens, []
        return tokens

    def rate(self, num_outputs: int) -> float:
        """The share of drafted tokens that are right, of those behind right ones. ``num_outputs``: now."""
        forgotten = exp((self._num_outputs - num_outputs) / FORGOTTEN)
        return FIRST_RATE + (self._measured - FIRST_RATE) * forgotten

    def measure(self, tokens: list[int], outputs: Sequence[int]) -> None:
        """Compare tokens that were taken with those that came behind the ones at ``keep``."""
        for draft, token in zip(tokens, outputs[self._num_outputs :], strict=False):
            self._measured += ((draft == token) - self._measured) * WEIGHT
            if draft != token:
                break
