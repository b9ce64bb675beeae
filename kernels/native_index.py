"""The index of sparse attention on CPUs: see cpu/index_scores.h and ``sparse_index``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _cpu
from .interface import AttentionInputs
from .native_layers import DTYPE_CODES, heads_in_memory


def index_slots(
    q: Tensor, weights: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs, count: int
) -> Tensor:
    """See ``interface.Kernels``."""
    rows, num_heads, head_dim = q.shape
    assert (q.stride()[1:], q.dtype, pool.shape[5]) == ((head_dim, 1), pool.dtype, head_dim)
    assert (weights.dtype, weights.shape, weights.is_contiguous()) == (torch.float32, (rows, num_heads), True)
    chosen = torch.empty((rows, count), dtype=torch.int32)
    _cpu.index_slots(
        q.data_ptr(), q.stride(0), weights.data_ptr(), pool.data_ptr(), inputs.query_start_loc.data_ptr(),
        inputs.seq_lens.data_ptr(), inputs.block_tables.data_ptr(), chosen.data_ptr(), len(inputs.seq_lens),
        inputs.block_tables.shape[1], pool.shape[1], layer, pool.shape[4], heads_in_memory(pool)[0],
        num_heads, head_dim, count, DTYPE_CODES[q.dtype],
    )  # fmt: skip
    return chosen
