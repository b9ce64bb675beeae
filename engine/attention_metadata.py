"""What attention needs to know of one step's batch, as tensors on the model's device. Passed down, never kept in a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    @classmethod
    def from_batch(cls, batch: Batch, device: torch.device) -> AttentionMetadata:
        return cls(
            positions=torch.from_numpy(batch.positions).to(device),
            query_start_loc=torch.from_numpy(batch.query_start_loc).to(device),
            seq_lens=torch.from_numpy(batch.seq_lens).to(device),
            block_tables=torch.from_numpy(batch.block_tables).contiguous().to(device),
            slot_mapping=torch.from_numpy(batch.slot_mapping).to(device),
        )
