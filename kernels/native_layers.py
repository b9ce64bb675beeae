"""A decoder's layers on a CPU in one call: see cpu/decoder.h. What Python spends between kernels is most of a
small step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import _cpu
from .interface import AttentionInputs, DenseMlp, LayerParts, RopeInputs
from .mixture_shape import ACTIVATIONS

NO_WINDOW = 2**31 - 1
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
CACHE_CODES = {torch.float8_e4m3fn: 1, torch.int8: 2}  # 0: the pool is in the model's type


class NativeLayers:
    """See ``interface.FusedLayers``. Keeps the addresses of weights that the layers own."""

    def __init__(
        self,
        layers: Sequence[LayerParts],
        products: Sequence[Sequence[int]],
        eps: float,
        rows: int,
        num_slots: int,
    ) -> None:
        """``products``: for each layer the Matrix (cpu/decoder.h) of qkv, o, gate_up and down, then the
        address of its mixture and of the slots of the four; 0 for those that it has not. ``rows``: see
        ``FusedLayers``."""
        self.rows, self._num_slots = rows, num_slots
        self._layers, self._eps = layers, eps  # the addresses are theirs
        table = []
        dense = [layer.mlp for layer in layers if isinstance(layer.mlp, DenseMlp)]
        self._intermediate_size = dense[0].intermediate_size if dense else 0
        for layer, of in zip(layers, products, strict=True):
            activation = layer.mlp.activation if isinstance(layer.mlp, DenseMlp) else "silu"
            row = (
                address(layer.input_norm), *of[:3], address(layer.q_norm), address(layer.k_norm),
                layer.norms_all_heads, address(layer.cos_sin), *of[3:6], address(layer.attention_out_norm),
                address(layer.post_norm), *of[6:9], ACTIVATIONS.index(activation), *of[9:13],
                address(layer.mlp_out_norm),
                NO_WINDOW if layer.sliding_window is None else layer.sliding_window, address(layer.sinks),
                *of[13:],
            )  # fmt: skip
            table.append(row)
        self._table = np.array(table, np.int64)  # a LayerWeights each
        self._address = self._table.ctypes.data

    def __call__(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        residual: Tensor,
        pool: Tensor,
        rope: RopeInputs,
        attention: AttentionInputs,
        adapters: Tensor | None = None,
    ) -> None:
        assert hidden.is_contiguous()
        assert residual.is_contiguous()
        assert residual.dtype == hidden.dtype
        assert adapters is None or (adapters.dtype, adapters.is_contiguous()) == (torch.int32, True)
        assert pool.is_contiguous()  # not some heads of a wider one
        code, cache = cache_codes(hidden.dtype, pool)
        num_tokens, hidden_size = residual.shape
        _cpu.decoder_layers(
            self._address, first, last, hidden.data_ptr(), residual.data_ptr(), num_tokens, hidden_size,
            self._intermediate_size, pool.data_ptr(), rope.positions.data_ptr(),
            rope.slot_mapping.data_ptr(), attention.query_start_loc.data_ptr(), attention.seq_lens.data_ptr(),
            attention.block_tables.data_ptr(), attention.seq_lens.shape[0], attention.block_tables.shape[1],
            pool.shape[1], pool.shape[4], rope.num_heads, rope.num_kv_heads, pool.stride(2), rope.head_dim,
            attention.scale, attention.softcap, self._eps, rope.norm_eps, code, cache,
            address(rope.kv_scales), address(adapters), self._num_slots,
        )  # fmt: skip


def layers_in_memory(pool: Tensor) -> int:
    """How many layers lie between a block of ``pool``, which may be a view of some blocks, and the next."""
    return pool.stride(0) // pool.stride(1)


def heads_in_memory(pool: Tensor) -> tuple[int, int]:
    """Numbers from one plane of ``pool`` to the next, and runs from one of its heads to the next. It may be a
    view of some heads, or of the latent vectors or index keys alone."""
    _, layers, planes, _, block_size, row = pool.shape
    run = block_size * row
    plane, head = pool.stride()[2:4]
    assert pool.stride()[1:] == (planes * plane, plane, head, row, 1)
    assert pool.stride(0) % (layers * planes * plane) == 0
    assert head % run == 0
    return plane, head // run


def cache_codes(dtype: torch.dtype, pool: Tensor) -> tuple[int, int]:
    """What the kernels call the model's type and the pool's."""
    assert pool.dtype == dtype or pool.dtype in CACHE_CODES
    return DTYPE_CODES[dtype], CACHE_CODES.get(pool.dtype, 0)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
