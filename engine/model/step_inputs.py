"""The inputs of a step's attention, as the layers take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.interface import AttentionInputs, RopeInputs
from ...kernels.states import StateInputs
from .latent_chunks import LatentChunks
from .sparse_attention import SparseStep


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention needs to know of one step's batch, as tensors on the model's device.

    positions       int32 [num_tokens]
    query_start_loc int32 [num_seqs + 1]
    seq_lens        int32 [num_seqs]              KV length, this step's tokens included
    block_tables    int32 [num_seqs, max_blocks]
    slot_mapping    int64 [num_tokens]
    max_query_len   tokens of the longest chunk; None: the host does not know it, as in a graph
    adapters        int32 [num_tokens], see ``StepSlots``; None: no row has one
    states          of the sequences' recurrent layers; None: the model has none
    rope            see ``Batch.rope``
    on_host         query_start_loc, seq_lens and block_tables; None: of a graph, or a sequence has one token
    """

    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int | None = None
    adapters: Tensor | None = None
    states: StateInputs | None = None
    rope: Tensor | None = None
    on_host: tuple[Tensor, Tensor, Tensor] | None = None

    def of_rows(self, rows: Tensor) -> AttentionMetadata:
        """For queries of the token rows ``rows`` (int64) alone: each is a sequence of its own that ends with
        that token. Row -1 is padding: a sequence of no tokens. For the last layer: its states are written."""
        sequences = torch.searchsorted(self.query_start_loc, rows.int(), right=True) - 1
        return AttentionMetadata(
            positions=self.positions[rows],
            query_start_loc=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            seq_lens=(self.positions[rows] + 1) * (rows >= 0),
            block_tables=self.block_tables[sequences],
            slot_mapping=self.slot_mapping[rows],
            adapters=None if self.adapters is None else self.adapters[rows],
            rope=None if self.rope is None else self.rope[..., rows],
        )


class StepImages(NamedTuple):
    """The features of a step's images, which stand in place of the embeddings of their tokens.

    rows     int64 [n]                   their token rows
    features [n, hidden_size]
    deep     each [n, hidden_size]       added to the hidden states behind the first layers, one a layer
    """

    rows: Tensor
    features: Tensor
    deep: Sequence[Tensor] = ()


class StepInputs(NamedTuple):
    """What the layers of one step share. One object for all: plans of attention are made once."""

    rope: RopeInputs
    attention: AttentionInputs
    adapters: Tensor | None
    states: StateInputs | None = None
    chunks: LatentChunks | None = None
    sparse: SparseStep | None = None
