"""Rows of activations in float8_e4m3fn, each with the scale that makes its largest value 448: what a float8
product takes. Kernels whose program has a whole row at hand (norms, the MLP's gate) write it so themselves.

Bytes: a row of two bytes an element in, one of one byte and four for its scale out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

Fp8Rows = tuple[Tensor, Tensor]  # float8_e4m3fn [num_tokens, n], float32 [num_tokens, 1]


def empty_fp8_rows(rows: int, n: int, device: torch.device) -> Fp8Rows:
    quantized = torch.empty((rows, n), dtype=torch.float8_e4m3fn, device=device)
    return quantized, torch.empty((rows, 1), dtype=torch.float32, device=device)


def fp8_rows(x: Tensor) -> Fp8Rows:
    """Round x [num_tokens, n]."""
    rows, n = x.shape
    assert x.stride(1) == 1
    out = empty_fp8_rows(rows, n, x.device)
    _fp8_rows_kernel[(rows,)](x, *out, x.stride(0), N=n, COLUMNS=triton.next_power_of_2(n), num_warps=8)
    return out


@triton.jit
def store_fp8_row(values, quantized, scales, row, N: tl.constexpr, COLUMNS: tl.constexpr):
    """``values`` float32 [COLUMNS], zero from N on."""
    columns = tl.arange(0, COLUMNS)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), 0), 448.0), 1e-12)
    tl.store(scales + row, scale)
    scaled = tl.minimum(tl.maximum(tl.div_rn(values, scale), -448.0), 448.0)
    tl.store(quantized + row * N + columns, scaled.to(quantized.dtype.element_ty), mask=columns < N)


@triton.jit
def _fp8_rows_kernel(x, quantized, scales, stride, N: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    values = tl.load(x + row * stride + columns, mask=columns < N, other=0.0).to(tl.float32)
    store_fp8_row(values, quantized, scales, row, N, COLUMNS)
