"""Gated delta nets on CPUs: see cpu/delta_net.h."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _cpu
from .delta_net import DeltaNetShape, DeltaNetWeights, StateInputs, StatePlace
from .native_layers import DTYPE_CODES, heads_in_memory
from .native_linear import check_rows

FEWEST_LANES = 4  # of the vectors that value heads are made of


def delta_net(
    projected: Tensor,
    pool: Tensor,
    place: StatePlace,
    shape: DeltaNetShape,
    weights: DeltaNetWeights,
    inputs: StateInputs,
) -> Tensor:
    """See ``interface.Kernels``. Raises ValueError where vectors do not divide a value head."""
    if shape.value_dim % FEWEST_LANES:
        raise ValueError(
            f"value heads of {shape.value_dim} numbers have no C++ kernel: multiples of {FEWEST_LANES} have"
        )
    check_rows(projected, projected.dtype, shape.width)
    num_seqs, _, table_stride = inputs.tables.shape
    assert place.first + place.count <= table_stride
    for tensor in (inputs.query_start_loc, inputs.tables, inputs.source, inputs.marks):
        assert (tensor.dtype, tensor.is_contiguous()) == (torch.int32, True)
    for tensor in (weights.conv, weights.decay, weights.dt, weights.norm):
        assert tensor.is_contiguous()
    assert weights.decay.dtype == weights.dt.dtype == torch.float32
    run_bytes = pool.shape[4] * pool.shape[5] * pool.itemsize
    assert run_bytes % (4 * shape.value_dim) == 0  # see num_state_blocks
    out = projected.new_zeros((len(projected), shape.num_value_heads * shape.value_dim))
    _cpu.delta_net(
        projected.data_ptr(), pool.data_ptr(), out.data_ptr(), weights.conv.data_ptr(),
        weights.decay.data_ptr(), weights.dt.data_ptr(), weights.norm.data_ptr(),
        inputs.query_start_loc.data_ptr(), inputs.tables.data_ptr(), inputs.source.data_ptr(),
        inputs.marks.data_ptr(), num_seqs, table_stride, place.first, pool.shape[1], place.layer,
        pool.shape[2], pool.shape[3], *heads_in_memory(pool), run_bytes // 4, shape.num_key_heads,
        shape.num_value_heads, shape.key_dim, shape.value_dim, shape.conv_size, weights.eps,
        DTYPE_CODES[projected.dtype], DTYPE_CODES[weights.conv.dtype], DTYPE_CODES[weights.norm.dtype],
    )  # fmt: skip
    return out
