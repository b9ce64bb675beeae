"""Which steps are measured: a grid over what a step's time depends on, and random ones to test the fit with.
Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ...engine.latency_profile import StepRole

NUM_HELD_OUT = 12
"""Random steps of each role that the fit does not see."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A step: for each sequence (tokens cached before it, new tokens)."""

    role: StepRole
    sequences: tuple[tuple[int, int], ...]
    held_out: bool = False

    @property
    def units(self) -> int:
        """New tokens of a prompt's step, sequences of a decode step."""
        return len(self.sequences) if self.role == "decode" else sum(new for _, new in self.sequences)

    @property
    def reads(self) -> int:
        """Query-key pairs of a prompt's step, context tokens of a decode step."""
        if self.role == "decode":
            return sum(cached + new for cached, new in self.sequences)
        return sum(new * cached + new * (new + 1) // 2 for cached, new in self.sequences)

    @property
    def cached(self) -> int:
        """Tokens before the chunks of a prompt's step."""
        return 0 if self.role == "decode" else sum(cached for cached, _ in self.sequences)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a worker can run: its options, and its KV cache of ``num_blocks`` blocks of ``block_size``
    tokens."""

    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def fits(self, sequences: tuple[tuple[int, int], ...]) -> bool:
        """Whether they can lie in the cache side by side."""
        blocks = sum(-(-(cached + new) // self.block_size) for cached, new in sequences)
        longest = max(cached + new for cached, new in sequences)
        return blocks <= self.num_blocks and longest <= self.max_model_len


def knots(largest: int) -> list[int]:
    """Powers of two below ``largest``, and that."""
    return [1 << i for i in range((largest - 1).bit_length())] + [largest]


def prefill_knots(bounds: Bounds) -> list[int]:
    return [n for n in knots(bounds.max_batch_tokens) if n == 1 or n >= 16]


def decode_knots(bounds: Bounds) -> list[int]:
    return knots(bounds.max_num_seqs)


def experiments(bounds: Bounds, seed: int = 0) -> list[Experiment]:
    """The grid, then the held-out steps."""
    draw = random.Random(seed)
    found = [*_prefill_grid(bounds), *_decode_grid(bounds)]
    for role, draw_one in (("prefill", _random_prefill), ("decode", _random_decode)):
        drawn = (draw_one(bounds, draw) for _ in range(20 * NUM_HELD_OUT))
        kept = [sequences for sequences in drawn if bounds.fits(sequences)][:NUM_HELD_OUT]
        found += [Experiment(role, sequences, held_out=True) for sequences in kept]  # type: ignore[arg-type]
    return found


def _prefill_grid(bounds: Bounds) -> list[Experiment]:
    grid = {}
    for tokens in prefill_knots(bounds):
        for share in (0.0, 0.4, 1.0) if tokens > 1 else (0.0,):  # one token after others is a decode step
            for seqs in {1, min(4, tokens)}:
                new = tokens // seqs
                cached = int(share * (bounds.max_model_len - new - 1))
                sequences = ((cached, new),) * (seqs - 1) + ((cached, tokens - new * (seqs - 1)),)
                if bounds.fits(sequences):
                    grid[sequences] = Experiment("prefill", sequences)
    return list(grid.values())


def _decode_grid(bounds: Bounds) -> list[Experiment]:
    grid = {}
    for seqs in decode_knots(bounds):
        longest = min(bounds.max_model_len, bounds.num_blocks // seqs * bounds.block_size) - 1
        for share in (0.0, 0.25, 1.0):
            cached = max(1, int(share * longest))
            sequences = ((cached, 1),) * seqs
            if bounds.fits(sequences):
                grid[sequences] = Experiment("decode", sequences)
    return list(grid.values())


def _random_prefill(bounds: Bounds, draw: random.Random) -> tuple[tuple[int, int], ...]:
    tokens = int(bounds.max_batch_tokens ** draw.uniform(0.4, 1.0))
    seqs = draw.choice([1, 1, 2, 3])
    parts = [max(1, tokens // seqs)] * seqs
    return tuple((int(draw.random() ** 2 * (bounds.max_model_len - new)), new) for new in parts)


def _random_decode(bounds: Bounds, draw: random.Random) -> tuple[tuple[int, int], ...]:
    seqs = int(bounds.max_num_seqs ** draw.random())
    return tuple((1 + int(draw.random() ** 2 * (bounds.max_model_len - 2)), 1) for _ in range(seqs))
