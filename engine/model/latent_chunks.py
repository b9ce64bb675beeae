"""Chunks of prompts whose latent vectors are expanded, a key and a value for each head of each token
(``latent_attention.py``). Where blocks are spread over ranks, the vectors of all chunks' contexts are first
brought to every rank, and on GPUs they are not expanded.

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
from ..device import send_all
from .block_spread import BlockSpread
from .latent_config import LatentConfig

FEWEST_TOKENS = 32  # for fewer, calls cost more than FLOPs


@dataclass(frozen=True, slots=True)
class LatentChunks:
    """The sequences of a step whose chunks are expanded, and the others.

    rows, other_rows  int64: their token rows
    blocks            int64: the pool's blocks that the chunks read; see ``BlockSpread.placed``
    attention         of ``rows``, in a pool of these blocks alone
    others            of ``other_rows``, in the whole pool
    expanded          False: the chunks' sequences are absorbed, too
    """

    rows: Tensor
    other_rows: Tensor
    blocks: Tensor
    attention: AttentionInputs
    others: AttentionInputs
    expanded: bool = True

    def sent_to(self, device: torch.device) -> LatentChunks:
        """In one copy; without ``others``."""
        a, names = self.attention, ("query_start_loc", "seq_lens", "block_tables")
        columns = {"rows": self.rows, "other_rows": self.other_rows, "blocks": self.blocks}
        sent = send_all(columns | {name: getattr(a, name) for name in names}, device)
        attention = replace(a, **{name: sent[name] for name in names})
        return replace(self, attention=attention, **{name: sent[name] for name in columns})


@dataclass(frozen=True, slots=True)
class ExpandedQueries:
    """``whole`` [rows, num_heads, plain + rotated]: of the chunks, or absorbed as they are; ``absorbed`` [other
    rows, num_heads, cached]."""

    whole: Tensor
    absorbed: Tensor
    chunks: LatentChunks


def latent_chunks(
    config: LatentConfig,
    inputs: AttentionInputs,
    block_size: int,
    spread: BlockSpread | None = None,
    expands: bool = True,
) -> LatentChunks | None:
    """None: all sequences of the step are absorbed. The inputs are on the CPU. With ``spread`` all chunks of
    many tokens are chosen; they are expanded if ``expands`` and that saves FLOPs of one."""
    counts = inputs.query_start_loc.diff()
    saving = torch.tensor(
        [
            count >= FEWEST_TOKENS and expanding_saves(config, count, length)
            for count, length in zip(counts.tolist(), inputs.seq_lens.tolist(), strict=True)
        ]
    )
    chosen = saving if spread is None else counts >= FEWEST_TOKENS
    if not chosen.any():
        return None
    rows = chosen.repeat_interleave(counts)
    tables = inputs.block_tables[chosen]
    num_blocks = -(-inputs.seq_lens[chosen] // block_size)
    used = torch.arange(tables.shape[1]) < num_blocks[:, None]
    blocks, places = torch.unique(tables[used].long(), return_inverse=True)
    if spread is not None:
        blocks, of_block = spread.placed(blocks)
        places = of_block[places]
    own = torch.zeros_like(tables)
    own[used] = places.int()
    attention, others = _of(inputs, chosen, counts), _of(inputs, ~chosen, counts)
    return LatentChunks(
        rows.nonzero().flatten(), (~rows).nonzero().flatten(), blocks,
        replace(attention, block_tables=own, kv_scales=None), others, expands and bool(saving.any()),
    )  # fmt: skip


def expanding_saves(config: LatentConfig, num_tokens: int, length: int) -> bool:
    """See the formula above."""
    pairs = num_tokens * (length - num_tokens / 2)
    cost = 2 * config.rank * (config.plain + config.value) * (length - num_tokens)
    return cost < 4 * (config.cached - config.expanded) * pairs


def _of(inputs: AttentionInputs, chosen: Tensor, counts: Tensor) -> AttentionInputs:
    """The chosen sequences of ``inputs``."""
    starts = torch.nn.functional.pad(counts[chosen].cumsum(0), (1, 0)).int()
    return replace(
        inputs, query_start_loc=starts, seq_lens=inputs.seq_lens[chosen],
        block_tables=inputs.block_tables[chosen].contiguous(), plans={},
    )  # fmt: skip
