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
    for tensor in (weights.decay, weights.dt, weights.conv_bias, weights.skip):
        assert tensor is None or (tensor.dtype, tensor.is_contiguous()) == (torch.float32, True)
    norm = weights.skip if weights.norm is None else weights.norm
    assert norm is not None
    assert weights.conv.is_contiguous()
    assert norm.is_contiguous()
    out = projected.new_zeros((len(projected), shape.num_value_heads * shape.value_dim))
    _cpu.delta_net(
        projected.data_ptr(), out.data_ptr(), weights.conv.data_ptr(), weights.decay.data_ptr(),
        weights.dt.data_ptr(), norm.data_ptr(), _address(weights.conv_bias), _address(weights.skip),
        shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim, shape.conv_size,
        weights.eps, weights.beta_scale, DTYPE_CODES[projected.dtype], DTYPE_CODES[weights.conv.dtype],
        DTYPE_CODES[norm.dtype], *_arguments(pool, place, shape, inputs),
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
        projected.data_ptr(), out.data_ptr(), weights.conv.data_ptr(), _address(weights.bias),
        shape.channels, shape.conv_size,
        DTYPE_CODES[projected.dtype], *_arguments(pool, place, shape, inputs),
    )  # fmt: skip
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _arguments(pool: Tensor, place: StatePlace, shape: StateShape, inputs: StateInputs) -> tuple[int, ...]:
    """``StateArgs`` of cpu/kernels.h."""
    check_states(pool, place, shape, inputs)
    num_seqs, _, table_stride = inputs.tables.shape
    run = pool.shape[4] * pool.shape[5]
    plane, head_step = heads_in_memory(pool)
    return (
        pool.data_ptr(), inputs.query_start_loc.data_ptr(), inputs.tables.data_ptr(),
        inputs.source.data_ptr(), inputs.marks.data_ptr(), num_seqs, table_stride, place.offset,
        layers_in_memory(pool), place.layer, pool.shape[2], pool.shape[3], plane // run, head_step,
        run * pool.itemsize // 4,
    )  # fmt: skip
