"""Kernels of layers that keep a state, on CPUs: see cpu/delta_net.h and cpu/short_conv.h."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _cpu
from .delta_net import DeltaNetShape, DeltaNetWeights
from .native_layers import DTYPE_CODES, heads_in_memory, layers_in_memory
from .native_linear import check_rows
from .short_conv import ShortConvShape, ShortConvWeights
from .state_shape import StatePlace, StateShape
from .states import StateInputs, check_states

FEWEST_LANES = 4  # of the vectors that value heads and channels are made of


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
    for tensor in (weights.conv, weights.decay, weights.dt, weights.norm):
        assert tensor.is_contiguous()
    assert weights.decay.dtype == weights.dt.dtype == torch.float32
    out = projected.new_zeros((len(projected), shape.num_value_heads * shape.value_dim))
    _cpu.delta_net(
        projected.data_ptr(), out.data_ptr(), weights.conv.data_ptr(), weights.decay.data_ptr(),
        weights.dt.data_ptr(), weights.norm.data_ptr(), shape.num_key_heads, shape.num_value_heads,
        shape.key_dim, shape.value_dim, shape.conv_size, weights.eps, weights.beta_scale,
        DTYPE_CODES[projected.dtype], DTYPE_CODES[weights.conv.dtype], DTYPE_CODES[weights.norm.dtype],
        *_arguments(pool, place, shape, inputs),
    )  # fmt: skip
    return out


def short_conv(
    projected: Tensor,
    pool: Tensor,
    place: StatePlace,
    shape: ShortConvShape,
    weights: ShortConvWeights,
    inputs: StateInputs,
) -> Tensor:
    """See ``interface.Kernels``. Raises ValueError where vectors do not divide a head's channels."""
    if shape.channels % (FEWEST_LANES * pool.shape[3]):
        raise ValueError(
            f"{shape.channels} channels beside {pool.shape[3]} key-value heads have no C++ kernel: multiples "
            f"of {FEWEST_LANES} for each head have"
        )
    check_rows(projected, projected.dtype, shape.width)
    for tensor in (weights.conv, weights.bias):
        assert tensor is None or (tensor.dtype, tensor.is_contiguous()) == (torch.float32, True)
    out = projected.new_zeros((len(projected), shape.channels))
    _cpu.short_conv(
        projected.data_ptr(), out.data_ptr(), weights.conv.data_ptr(),
        0 if weights.bias is None else weights.bias.data_ptr(), shape.channels, shape.conv_size,
        DTYPE_CODES[projected.dtype], *_arguments(pool, place, shape, inputs),
    )  # fmt: skip
    return out


def _arguments(pool: Tensor, place: StatePlace, shape: StateShape, inputs: StateInputs) -> tuple[int, ...]:
    """``StateArgs`` of cpu/kernels.h."""
    check_states(pool, place, shape, inputs)
    num_seqs, _, table_stride = inputs.tables.shape
    run_bytes = pool.shape[4] * pool.shape[5] * pool.itemsize
    return (
        pool.data_ptr(), inputs.query_start_loc.data_ptr(), inputs.tables.data_ptr(),
        inputs.source.data_ptr(), inputs.marks.data_ptr(), num_seqs, table_stride, place.offset,
        layers_in_memory(pool), place.layer, pool.shape[2], pool.shape[3], *heads_in_memory(pool),
        run_bytes // 4,
    )  # fmt: skip
