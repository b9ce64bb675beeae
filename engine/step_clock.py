"""How long batches take by a latency profile. Free of torch."""

from __future__ import annotations

import logging

import numpy as np

from .latency_profile import Profile, StepModel
from .step.batch import Batch

_log = logging.getLogger(__name__)


def parts_of(batch: Batch) -> tuple[list[tuple[int, int]], int, int]:
    """Prompt chunks as (cached tokens before, new tokens); how many sequences decode, and the tokens of these
    in all. (Those with one token that continue what is cached decode.)"""
    new = np.diff(batch.query_start_loc)
    cached = batch.seq_lens - new
    decoding = (new == 1) & (cached > 0)
    chunks = list(zip(cached[~decoding].tolist(), new[~decoding].tolist(), strict=True))
    return chunks, int(decoding.sum()), int(batch.seq_lens[decoding].sum())


class StepClock:
    """Asks a profile how long batches take. What leaves the measured range is counted, and warned of once per
    quantity if it ``warns``."""

    def __init__(self, profile: Profile, warns: bool = True) -> None:
        self.profile, self._warns = profile, warns
        self.num_steps = 0
        self.num_outside: dict[str, int] = {}

    def prefill(self, chunks: list[tuple[int, int]]) -> float:
        """Seconds of a prefill step; ``chunks``: (cached tokens before, new tokens)."""
        tokens = sum(new for _, new in chunks)
        pairs = sum(new * cached + new * (new + 1) // 2 for cached, new in chunks)
        cached = sum(before for before, _ in chunks)
        self._watch("prefill", self.profile.prefill, tokens, pairs, len(chunks), cached)
        return self.profile.prefill.seconds(tokens, pairs, len(chunks), cached)

    def decode(self, num_seqs: int, num_context_tokens: int) -> float:
        """Seconds of a decode step over these sequences, with ``num_context_tokens`` in all."""
        self._watch("decode", self.profile.decode, num_seqs, num_context_tokens, num_seqs)
        return self.profile.decode.seconds(num_seqs, num_context_tokens, num_seqs)

    def mixed(self, chunks: list[tuple[int, int]], num_seqs: int, num_context_tokens: int) -> float:
        """Seconds of one step over prompt chunks and decoding sequences: what both pay for any step at all is
        paid once."""
        if not chunks or not num_seqs:
            return self.prefill(chunks) if chunks else self.decode(num_seqs, num_context_tokens)
        both = self.prefill(chunks) + self.decode(num_seqs, num_context_tokens)
        return max(0.0, both - self.profile.once_s)

    def batch(self, batch: Batch) -> float:
        """Seconds of any batch."""
        return self.mixed(*parts_of(batch))

    def _watch(
        self, role: str, model: StepModel, units: float, reads: float, seqs: float, cached: float = 0.0
    ) -> None:
        self.num_steps += 1
        if name := model.outside(units, reads, seqs, cached):
            key = f"{role} {name}"
            if self._warns and key not in self.num_outside:
                low_high = model.ranges[name]  # type: ignore[index]
                _log.warning(
                    "%s: a %s step is outside the measured %s (%g to %g)",
                    self.profile.name,
                    role,
                    name,
                    *low_high,
                )
            self.num_outside[key] = self.num_outside.get(key, 0) + 1
