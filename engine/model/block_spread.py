"""KV blocks of latent attention spread over a worker's ranks (decode context parallelism, as vLLM calls it):
block b of the worker lies on rank b % size alone, at place b // size there. All heads share a token's vector,
so N ranks hold N times the tokens that they would if each had every vector.

A decode row's queries of all heads go to all ranks. Each attends over its own blocks of the sequence, and
each gets of the others what its heads' sums are there (Dao et al., Flash-Decoding, 2023):

    lse = log sum_r exp(lse_r)      sum = sum_r exp(lse_r - lse) sum_r      in float32, in the order of ranks

For chunks of many tokens the vectors go to the queries instead: ``latent_chunks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.interface import AttentionInputs
from .config import ModelConfig
from .ranks import Rank

ROWS_AT_ONCE = 256  # a row's queries and sums of all heads take memory: DeepSeek-V3's about 1 MiB
GATHERED_TOKENS = 1 << 16  # whose vectors are brought to all ranks at once; those of a sequence at least
SLICES = "slices"  # their place in ``AttentionInputs.plans``


@dataclass(frozen=True, slots=True)
class BlockSpread:
    """``rank``: whose blocks these are; ``block_size`` in tokens."""

    rank: Rank
    block_size: int

    def own_slots(self, slots: Tensor) -> Tensor:
        """Slots of the worker's pool, int64 [num_tokens], in this rank's; -1: on another rank, or padding as
        before."""
        blocks = slots // self.block_size
        own = blocks % self.rank.size == self.rank.number
        return torch.where(own, blocks // self.rank.size * self.block_size + slots % self.block_size, -1)

    def own_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        """The blocks that this rank has of sequences with one query each, in their order: a last block that
        is not full stays the last. Graphs record this."""
        tables, size = inputs.block_tables, self.rank.size
        num_columns = tables.shape[1]
        starts = torch.arange(num_columns, dtype=torch.int32, device=tables.device) * self.block_size
        held = (inputs.seq_lens[:, None] - starts).clamp(0, self.block_size)  # tokens of each block
        own = (held > 0) & (tables % size == self.rank.number)
        columns = torch.where(own, own.cumsum(1) - 1, num_columns)  # the others': behind the last
        packed = tables.new_zeros(len(tables), num_columns + 1).scatter_(1, columns, tables // size)
        lengths = (held * own).sum(1, dtype=torch.int32)
        return replace(inputs, seq_lens=lengths, block_tables=packed, plans={})

    def slices(self, inputs: AttentionInputs) -> list[tuple[slice, AttentionInputs]]:
        """``own_inputs`` in slices of ``ROWS_AT_ONCE`` rows, made once a step."""
        if SLICES not in inputs.plans:
            starts, lengths, tables = inputs.query_start_loc, inputs.seq_lens, inputs.block_tables
            total = len(lengths)
            slices = [slice(at, min(at + ROWS_AT_ONCE, total)) for at in range(0, total, ROWS_AT_ONCE)]
            inputs.plans[SLICES] = [
                (rows, inputs.of(starts[: rows.stop - rows.start + 1], lengths[rows], tables[rows]))
                for rows in slices
            ]
        found: list[tuple[slice, AttentionInputs]] = inputs.plans[SLICES]
        return found

    def queries(self, own: Tensor) -> Tensor:
        """[n, heads of this rank, D] -> [n, all heads, D]."""
        n, heads, width = own.shape
        return self.rank.joined(own.flatten(1), self.rank.size * heads * width).view(n, -1, width)

    def merged(self, sums: Tensor, lse: Tensor) -> Tensor:
        """Sums over this rank's blocks [n, all heads, R], and their log-sum-exps float32 [n, all heads] ->
        over all blocks [n, heads of this rank, R]. A row without any key is 0."""
        n, _, width = sums.shape
        packed = torch.cat((sums, lse[..., None].view(sums.dtype)), dim=-1)
        given = self.rank.exchanged(packed.view(n, self.rank.size, -1, packed.shape[2]).transpose(0, 1))
        lses = given[..., width:].contiguous().view(torch.float32)
        weights = (lses - lses.amax(0).clamp(min=torch.finfo(torch.float32).min)).exp()
        merged = (weights * given[..., :width]).sum(0) / weights.sum(0).clamp(min=1.0)
        return merged.to(sums.dtype)

    def gathered(self, blocks: Tensor) -> Tensor:
        """[n, ...], as many on each rank -> [size n, ...]: those of rank 0 first."""
        return self.rank.joined(blocks.reshape(1, -1), self.rank.size * blocks.numel()).view(
            -1, *blocks.shape[1:]
        )

    def placed(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct blocks of the worker's pool, int64 [n] -> the blocks that this rank gives to ``gathered``
        so that all have them, and where each of ``blocks`` then is."""
        owners, size = blocks % self.rank.size, self.rank.size
        counts = torch.bincount(owners, minlength=size)
        most, places = int(counts.max()), torch.empty_like(blocks)
        for number, count in enumerate(counts.tolist()):
            places[owners == number] = number * most + torch.arange(count)
        given = blocks.new_zeros(most)  # padded by the first
        own = blocks[owners == self.rank.number] // size
        given[: len(own)] = own
        return given, places


def step_bytes(config: ModelConfig, itemsize: int) -> int:
    """About what a step takes on a GPU for vectors that are brought there, and for rows of all heads' queries
    and sums. ``config``: of all ranks."""
    assert config.latent is not None
    vectors = 3 * max(config.max_model_len, GATHERED_TOKENS) * itemsize
    rows = ROWS_AT_ONCE * config.latent.num_heads * (4 * itemsize + 2 * 4)
    return (vectors + rows) * config.latent.cached
