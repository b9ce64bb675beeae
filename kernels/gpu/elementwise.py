"""The MLP's gate and the embedding's look-up.

gate_mul:   [gate | up] -> act(gate) * up                     bytes: 3 n elements a token; about 5 FLOPs each
embedding:  row ``token`` of the table                        bytes: 2 hidden elements a token
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..mixture_shape import Activation, num_inputs
from .fp8_rows import Fp8Rows, empty_fp8_rows, store_fp8_row

COLUMNS = 1024  # of one program


def gate_mul(gate_up: Tensor, activation: Activation, num_rows: Tensor | None = None) -> Tensor:
    """See ``interface.Kernels``. ``num_rows`` int32 [1]: rows from there on are left as they are; None: there
    are none."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // num_inputs(activation)
    assert gate_up.is_contiguous()
    out = torch.empty((rows, n), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(n, COLUMNS))
    _gate_mul_kernel[grid](
        gate_up, out, None, num_rows, N=n, ACTIVATION=activation, COLUMNS=COLUMNS, ROUNDS=False, num_warps=4
    )
    return out


def gate_fp8(gate_up: Tensor, activation: Activation) -> Fp8Rows:
    """``fp8_rows`` of ``gate_mul``: the same bits. One program a row."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // num_inputs(activation)
    assert gate_up.is_contiguous()
    out = empty_fp8_rows(rows, n, gate_up.device)
    columns = triton.next_power_of_2(n)
    _gate_mul_kernel[(rows,)](
        gate_up, *out, None, N=n, ACTIVATION=activation, COLUMNS=columns, ROUNDS=True,
        num_warps=min(16, max(4, columns // 512)),
    )  # fmt: skip
    return out


def embedding(table: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of table [vocab_size, hidden] -> [num_tokens, hidden]. An id outside the table, as padding rows
    have, gives zeros."""
    (rows,), (vocab_size, hidden) = token_ids.shape, table.shape
    assert table.is_contiguous()
    out = torch.empty((rows, hidden), dtype=dtype, device=table.device)
    grid = (rows, triton.cdiv(hidden, COLUMNS))
    _embedding_kernel[grid](
        table, token_ids, out, VOCAB_SIZE=vocab_size, HIDDEN=hidden, COLUMNS=COLUMNS, num_warps=4
    )
    return out


@triton.jit
def _gate_mul_kernel(
    gate_up, out, scales, num_rows, N: tl.constexpr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if num_rows is not None:  # noqa: SIM102, known when it is compiled
        if row >= tl.load(num_rows):
            return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < N
    UP: tl.constexpr = 0 if ACTIVATION == "relu_squared" else N  # where it begins
    gate = tl.load(gate_up + row * (UP + N) + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (UP + N) + UP + columns, mask=real, other=0.0).to(tl.float32)
    slope = gate
    if ACTIVATION == "clamped_silu":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        slope = gate * 1.702
    if ACTIVATION == "gelu_tanh":  # 1 + tanh(x) is 2 sigmoid(2 x)
        slope = gate * (gate * gate * 0.07135481627 + 1.5957691216)
    gated = gate * tl.sigmoid(slope) * up
    if ACTIVATION == "relu_squared":
        gated = tl.maximum(up, 0.0) * tl.maximum(up, 0.0)
    if ROUNDS:
        store_fp8_row(gated.to(gate_up.dtype.element_ty).to(tl.float32), out, scales, row, N, COLUMNS)
    else:
        tl.store(out + row * N + columns, gated.to(out.dtype.element_ty), mask=real)


@triton.jit
def _embedding_kernel(
    table, token_ids, out, VOCAB_SIZE: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(token_ids + row).to(tl.int64)
    known = (token >= 0) & (token < VOCAB_SIZE) & (columns < HIDDEN)
    values = tl.load(table + token * HIDDEN + columns, mask=known, other=0.0)
    tl.store(out + row * HIDDEN + columns, values.to(out.dtype.element_ty), mask=columns < HIDDEN)
