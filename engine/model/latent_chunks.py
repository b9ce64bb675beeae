"""Chunks of prompts whose latent vectors are expanded, a key and a value for each head of each token
(``latent_attention.py``).

FLOPs of a chunk of T tokens that ends a context of L, for each head; n = T (L - T / 2) pairs of a query and a
key; R, D, E: ``LatentConfig``'s rank, cached, expanded; plain and value as there:

    absorbed   2 R (plain + value) T + 4 D n
    expanded   2 R (plain + value) L + 4 E n

So a chunk is expanded where 2 R (plain + value) (L - T) < 4 (D - E) n. DeepSeek-V2 and V3: a prompt's first
chunk always, one after a long context from 171 tokens on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.interface import AttentionInputs
from .latent_config import LatentConfig

FEWEST_TOKENS = 32  # for fewer, calls cost more than FLOPs


@dataclass(frozen=True, slots=True)
class LatentChunks:
    """The sequences of a step whose chunks are expanded, and the others.

    rows, other_rows  int64: their token rows
    blocks            int64: the pool's blocks that the chunks read
    attention         of ``rows``, in a pool of these blocks alone
    others            of ``other_rows``, in the whole pool
    """

    rows: Tensor
    other_rows: Tensor
    blocks: Tensor
    attention: AttentionInputs
    others: AttentionInputs


@dataclass(frozen=True, slots=True)
class ExpandedQueries:
    """``whole`` [rows, num_heads, plain + rotated]: of the chunks; ``absorbed`` [other rows, num_heads,
    cached]."""

    whole: Tensor
    absorbed: Tensor
    chunks: LatentChunks


def latent_chunks(config: LatentConfig, inputs: AttentionInputs, block_size: int) -> LatentChunks | None:
    """None: all sequences of the step are absorbed. The inputs are on the CPU."""
    counts = inputs.query_start_loc.diff()
    chosen = torch.tensor(
        [
            count >= FEWEST_TOKENS and expanding_saves(config, count, length)
            for count, length in zip(counts.tolist(), inputs.seq_lens.tolist(), strict=True)
        ]
    )
    if not chosen.any():
        return None
    rows = chosen.repeat_interleave(counts)
    tables = inputs.block_tables[chosen]
    num_blocks = -(-inputs.seq_lens[chosen] // block_size)
    used = torch.arange(tables.shape[1]) < num_blocks[:, None]
    blocks, places = torch.unique(tables[used], return_inverse=True)
    own = torch.zeros_like(tables)
    own[used] = places.int()
    attention, others = of_sequences(inputs, chosen, counts), of_sequences(inputs, ~chosen, counts)
    return LatentChunks(
        rows.nonzero().flatten(), (~rows).nonzero().flatten(), blocks.long(),
        replace(attention, block_tables=own, kv_scales=None), others,
    )  # fmt: skip


def expanding_saves(config: LatentConfig, num_tokens: int, length: int) -> bool:
    """See the formula above."""
    pairs = num_tokens * (length - num_tokens / 2)
    cost = 2 * config.rank * (config.plain + config.value) * (length - num_tokens)
    return cost < 4 * (config.cached - config.expanded) * pairs


def of_sequences(inputs: AttentionInputs, chosen: Tensor, counts: Tensor) -> AttentionInputs:
    """The chosen sequences of ``inputs``; ``counts``: queries of each."""
    starts = torch.nn.functional.pad(counts[chosen].cumsum(0), (1, 0)).int()
    return replace(
        inputs, query_start_loc=starts, seq_lens=inputs.seq_lens[chosen],
        block_tables=inputs.block_tables[chosen].contiguous(), plans={},
    )  # fmt: skip
