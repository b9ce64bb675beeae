"""Masks of tokens that an output may have, and of runs of tokens that it must not have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...transport.messages.token_rules import TokenRules
from .constraint import TokenMatcher


class RuledMatcher:
    """A ``TokenMatcher`` around another one, or alone, with the same rule about threads."""

    def __init__(
        self, rules: TokenRules, vocab_size: int, eos: Sequence[int], inner: TokenMatcher | None
    ) -> None:
        """``eos``: end tokens, which alone are allowed where the rules leave nothing."""
        self._inner, self._bad, self._vocab_size = inner, rules.bad, vocab_size
        self._allowed = self._words(rules.allowed or range(vocab_size))
        self._ends = self._words(eos)
        self._failed: int | None = None  # number of tokens after which nothing may follow

    def failure(self, num_outputs: int) -> str:
        """See ``TokenMatcher``."""
        if self._failed is not None and self._failed <= num_outputs:
            return "the tokens that are allowed leave none that may follow"
        return "" if self._inner is None else self._inner.failure(num_outputs)

    def mask(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        """See ``TokenMatcher``."""
        words = self._allowed.copy()
        if self._inner is not None:
            words &= self._inner.mask(output_token_ids)
        for *before, last in self._bad:
            if last < self._vocab_size and (not before or list(output_token_ids[-len(before) :]) == before):
                words.view(np.uint8)[last // 8] &= ~np.uint8(1 << last % 8)
        if words.any():
            return words
        if self._failed is None:
            self._failed = len(output_token_ids)
        return self._ends

    def _words(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return a mask of these tokens. [ceil(vocab_size / 32)]"""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[[token_id for token_id in token_ids if token_id < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)
