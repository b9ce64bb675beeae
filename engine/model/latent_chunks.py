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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.interface import AttentionInputs
from ..device import send_all
from .block_spread import GATHERED_TOKENS, BlockSpread
from .latent_config import LatentConfig

FEWEST_TOKENS = 32  # for fewer, calls cost more than FLOPs


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Chunks that are computed together.

    num_rows   of their tokens, which lie one behind the other
    blocks     int64: the pool's blocks that they read; see ``BlockSpread.placed``
    attention  of their rows, in a pool of these blocks alone
    """

    num_rows: int
    blocks: Tensor
    attention: AttentionInputs


@dataclass(frozen=True, slots=True)
class LatentChunks:
    """The sequences of a step whose chunks are expanded, and the others.

    rows, other_rows  int64: their token rows
    groups            of ``rows``, in order
    others            of ``other_rows``, in the whole pool
    expanded          False: the chunks' sequences are absorbed, too
    """

    rows: Tensor
    other_rows: Tensor
    groups: Sequence[ChunkGroup]
    others: AttentionInputs
    expanded: bool = True

    def sent_to(self, device: torch.device) -> LatentChunks:
        """In one copy; without ``others``."""
        columns = {"rows": self.rows, "other_rows": self.other_rows}
        for i, group in enumerate(self.groups):
            columns[f"{i} blocks"] = group.blocks
            of = group.attention
            columns |= {f"{i} starts": of.query_start_loc, f"{i} lengths": of.seq_lens}
            columns[f"{i} tables"] = of.block_tables
        sent = send_all(columns, device)
        groups = [
            ChunkGroup(
                group.num_rows, sent[f"{i} blocks"],
                group.attention.of(*(sent[f"{i} {name}"] for name in ("starts", "lengths", "tables"))),
            )
            for i, group in enumerate(self.groups)
        ]  # fmt: skip
        return replace(self, rows=sent["rows"], other_rows=sent["other_rows"], groups=groups)


@dataclass(frozen=True, slots=True)
class ExpandedQueries:
    """``whole`` [rows, num_heads, plain + rotated]: of the chunks, absorbed where these are; ``absorbed``
    [other rows, num_heads, cached]."""

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
    """None: all sequences of the step are absorbed. The inputs are on the CPU. With ``spread`` the chunks are
    those whose vectors rather go to all ranks than their queries, and contexts are not read for each query;
    they are expanded if ``expands`` and that saves FLOPs of one."""
    counts, lengths = inputs.query_start_loc.diff(), inputs.seq_lens
    saving = torch.tensor(
        [
            count >= FEWEST_TOKENS and expanding_saves(config, count, length)
            for count, length in zip(counts.tolist(), lengths.tolist(), strict=True)
        ]
    )
    chosen = saving
    if spread is not None:
        moves_less = (counts > 1) & (lengths <= 2 * config.num_heads * spread.rank.size * counts)
        chosen = (counts >= FEWEST_TOKENS) | moves_less
    if not chosen.any():
        return None
    rows = chosen.repeat_interleave(counts)
    groups = [chosen] if spread is None else _groups(chosen, lengths)
    return LatentChunks(
        rows.nonzero().flatten(), (~rows).nonzero().flatten(),
        [_group(inputs, group, counts, block_size, spread) for group in groups],
        of_sequences(inputs, ~chosen, counts), expands and bool(saving.any()),
    )  # fmt: skip


def _groups(chosen: Tensor, lengths: Tensor) -> list[Tensor]:
    """The chosen sequences in parts of ``GATHERED_TOKENS``, each bool [num_seqs]."""
    groups, tokens = list[Tensor](), GATHERED_TOKENS
    for i in chosen.nonzero().flatten().tolist():
        tokens += (length := int(lengths[i]))
        if tokens > GATHERED_TOKENS:
            groups.append(torch.zeros_like(chosen))
            tokens = length
        groups[-1][i] = True
    return groups


def _group(
    inputs: AttentionInputs, chosen: Tensor, counts: Tensor, block_size: int, spread: BlockSpread | None
) -> ChunkGroup:
    tables = inputs.block_tables[chosen]
    num_blocks = -(-inputs.seq_lens[chosen] // block_size)
    used = torch.arange(tables.shape[1]) < num_blocks[:, None]
    blocks, places = torch.unique(tables[used].long(), return_inverse=True)
    if spread is not None:
        blocks, place_of = spread.placed(blocks)
        places = place_of[places]
    own = torch.zeros_like(tables)
    own[used] = places.int()
    attention = replace(of_sequences(inputs, chosen, counts), block_tables=own, kv_scales=None)
    return ChunkGroup(int(counts[chosen].sum()), blocks, attention)


def expanding_saves(config: LatentConfig, num_tokens: int, length: int) -> bool:
    """See the formula above."""
    pairs = num_tokens * (length - num_tokens / 2)
    cost = 2 * config.rank * (config.plain + config.value) * (length - num_tokens)
    return cost < 4 * (config.cached - config.expanded) * pairs


def of_sequences(inputs: AttentionInputs, chosen: Tensor, counts: Tensor) -> AttentionInputs:
    """The chosen sequences of ``inputs``; ``counts``: queries of each."""
    starts = torch.nn.functional.pad(counts[chosen].cumsum(0), (1, 0)).int()
    return inputs.of(starts, inputs.seq_lens[chosen], inputs.block_tables[chosen].contiguous())
