"""The kernels on CPUs: C++ from cpu/*.h, and oneDNN's matrix products where the CPU multiplies bfloat16
itself.

The C++ module takes addresses; this file is where tensors become addresses, so it checks what the module
believes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _cpu
from .huge_pages import HugePageArena
from .interface import AttentionInputs, LayerParts, Linear, RopeInputs
from .native_layers import BUILT, DTYPE_CODES, NO_WINDOW, NativeLayers

INSTRUCTION_SET: str = _cpu.instruction_sets()[0]
PANEL: int = _cpu.use_instruction_set(INSTRUCTION_SET)


class PackedLinear:
    """Weights in panels of ``PANEL`` columns, read in one stream."""

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: HugePageArena) -> None:
        weight = weight.contiguous()
        self._n, self._k = weight.shape
        self._dtype = weight.dtype
        self._code = DTYPE_CODES[weight.dtype]
        self._packed = arena.empty(-(-self._n // PANEL) * PANEL * -(-self._k // 2) * 2, weight.dtype)
        _cpu.pack_linear(weight.data_ptr(), self._packed.data_ptr(), self._n, self._k, self._code)
        self._bias = None if bias is None else bias.contiguous()
        self.addresses = (self._packed.data_ptr(), 0 if self._bias is None else self._bias.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        _check(x, self._dtype, self._k)
        y = torch.empty((x.shape[0], self._n), dtype=self._dtype)
        _cpu.linear(x.data_ptr(), *self.addresses, y.data_ptr(), x.shape[0], self._n, self._k, self._code)
        return y


class OneDnnLinear:
    """bfloat16 weights reordered once for the CPU's own bfloat16 instructions; one reordering serves every
    number of rows."""

    ROWS_HINT = 32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS_HINT)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class NativeCpuKernels:
    """See ``interface.Kernels`` for the contracts. Not for several threads at a time: they would share one
    pool of helpers."""

    def __init__(self, num_threads: int, onednn_bfloat16: bool) -> None:
        self._onednn_bfloat16 = onednn_bfloat16
        self._arena = HugePageArena()
        _cpu.set_num_threads(num_threads)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.dtype == torch.bfloat16 and self._onednn_bfloat16:
            return OneDnnLinear(weight, bias)
        return PackedLinear(weight, bias, self._arena)

    def embedding(self, table: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return table.index_select(0, token_ids).to(dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(None, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check(x, residual.dtype, residual.shape[-1])
        return self._norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        _check(gate_up, gate_up.dtype, gate_up.shape[1])
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty((rows, n), dtype=gate_up.dtype)
        _cpu.silu_mul(gate_up.data_ptr(), y.data_ptr(), rows, n, DTYPE_CODES[gate_up.dtype])
        return y

    def rope_and_store(self, qkv: Tensor, pool: Tensor, layer: int, rope: RopeInputs) -> Tensor:
        rows = qkv.shape[0]
        _check(qkv, pool.dtype, (rope.num_heads + 2 * rope.num_kv_heads) * rope.head_dim)
        _cpu.rope_and_store(
            qkv.data_ptr(),
            pool.data_ptr(),
            rope.cos_sin.data_ptr(),
            rope.positions.data_ptr(),
            rope.slot_mapping.data_ptr(),
            0 if rope.q_norm is None else rope.q_norm.data_ptr(),
            0 if rope.k_norm is None else rope.k_norm.data_ptr(),
            rows,
            pool.shape[1],
            layer,
            pool.shape[3],
            rope.num_heads,
            rope.num_kv_heads,
            rope.head_dim,
            rope.norm_eps,
            DTYPE_CODES[qkv.dtype],
        )
        return qkv.narrow(1, 0, rope.num_heads * rope.head_dim).view(rows, rope.num_heads, rope.head_dim)

    def paged_attention(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        rows, num_heads, head_dim = q.shape
        assert q.dtype == pool.dtype
        assert q.stride()[1:] == (head_dim, 1)
        out = torch.empty((rows, num_heads * head_dim), dtype=q.dtype)
        _cpu.attention(
            q.data_ptr(),
            q.stride(0),
            pool.data_ptr(),
            out.data_ptr(),
            inputs.query_start_loc.data_ptr(),
            inputs.seq_lens.data_ptr(),
            inputs.block_tables.data_ptr(),
            len(inputs.seq_lens),
            inputs.block_tables.shape[1],
            pool.shape[1],
            layer,
            pool.shape[3],
            num_heads,
            pool.shape[4],
            head_dim,
            NO_WINDOW if inputs.sliding_window is None else inputs.sliding_window,
            inputs.scale,
            DTYPE_CODES[q.dtype],
        )
        return out

    def fuse_layers(self, layers: Sequence[LayerParts], eps: float) -> NativeLayers | None:
        linears = [[layer.qkv, layer.o, layer.gate_up, layer.down] for layer in layers]
        addresses = [
            [linear.addresses for linear in row if isinstance(linear, PackedLinear)] for row in linears
        ]
        all_packed = all(len(row) == 4 for row in addresses)
        return NativeLayers(layers, addresses, eps) if all_packed and BUILT else None

    def gumbel_argmax(self, logits: Tensor, keys: Tensor) -> Tensor:
        _check(logits, torch.float32, logits.shape[1])
        chosen = torch.empty(len(logits), dtype=torch.int64)
        _cpu.gumbel_argmax(logits.data_ptr(), keys.contiguous().data_ptr(), chosen.data_ptr(), *logits.shape)
        return chosen

    def _norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check(residual, weight.dtype, len(weight))
        y = torch.empty_like(residual)
        address = 0 if x is None else x.data_ptr()
        rows, n = residual.shape
        _cpu.add_rms_norm(
            address,
            residual.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            rows,
            n,
            eps,
            DTYPE_CODES[residual.dtype],
        )
        return y


def _check(x: Tensor, dtype: torch.dtype, columns: int) -> None:
    found = (x.dtype, x.shape[1], x.is_contiguous())
    assert found == (dtype, columns, True), f"expected {dtype} rows of {columns}, found {found}"
