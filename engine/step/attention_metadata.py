"""What attention needs to know of one step's batch, as tensors on the model's device. Passed down, never kept
in a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.host_copies import send
from .batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """
    positions       int32 [num_tokens]
    query_start_loc int32 [num_seqs + 1]
    seq_lens        int32 [num_seqs]              KV length, this step's tokens included
    block_tables    int32 [num_seqs, max_blocks]
    slot_mapping    int64 [num_tokens]
    """

    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor

    def of_rows(self, rows: Tensor) -> AttentionMetadata:
        """For queries of the token rows ``rows`` (int64) alone: each is a sequence of its own that ends with
        that token."""
        sequences = torch.searchsorted(self.query_start_loc, rows.int(), right=True) - 1
        return AttentionMetadata(
            positions=self.positions[rows],
            query_start_loc=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            seq_lens=self.positions[rows] + 1,
            block_tables=self.block_tables[sequences],
            slot_mapping=self.slot_mapping[rows],
        )

    @classmethod
    def from_batch(cls, batch: Batch, device: torch.device) -> AttentionMetadata:
        """Without waiting for the device."""
        return cls(
            positions=send(torch.from_numpy(batch.positions), device),
            query_start_loc=send(torch.from_numpy(batch.query_start_loc), device),
            seq_lens=send(torch.from_numpy(batch.seq_lens), device),
            block_tables=send(torch.from_numpy(batch.block_tables).contiguous(), device),
            slot_mapping=send(torch.from_numpy(batch.slot_mapping), device),
        )
