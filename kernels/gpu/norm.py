"""Residual addition and RMSNorm in one pass.

    r = residual + x (rounded to its dtype, in place);  y = r / sqrt(mean(r^2) + eps) * weight

Bytes: 4 rows of ``hidden`` elements a token (x, residual in and out, y); 2 without a residual. About 5 FLOPs
an element. One program a row, which it reads whole: a row's sum has one order, whatever the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8_rows import Fp8Rows, empty_fp8_rows, store_fp8_row


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[num_tokens, hidden] -> the same shape."""
    y = torch.empty_like(x)
    _launch(None, x, weight, eps, y)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[num_tokens, hidden], both; ``residual`` takes ``x`` in."""
    y = torch.empty_like(x)
    _launch(x, residual, weight, eps, y)
    return y


def norm_fp8(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """``fp8_rows`` of ``add_rms_norm``, or without x of ``rms_norm(residual)``: the same bits."""
    rows, hidden = residual.shape
    rounded = empty_fp8_rows(rows, hidden, residual.device)
    _launch(x, residual, weight, eps, *rounded)
    return rounded


def _launch(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, y: Tensor, scales: Tensor | None = None
) -> None:
    rows, hidden = residual.shape
    assert x is None or (x.is_contiguous() and x.shape == residual.shape)
    assert residual.is_contiguous()
    columns = triton.next_power_of_2(hidden)
    _add_rms_norm_kernel[(rows,)](
        x, residual, weight, y, scales, eps, HIDDEN=hidden, COLUMNS=columns, ADDS=x is not None,
        ROUNDS=scales is not None, num_warps=min(8, max(1, columns // 512)),
    )  # fmt: skip


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, y, scales, eps, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    real = columns < HIDDEN
    row = tl.program_id(0).to(tl.int64)
    at = row * HIDDEN + columns
    values = tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        rounded = (values + tl.load(x + at, mask=real, other=0.0).to(tl.float32)).to(
            residual.dtype.element_ty
        )
        tl.store(residual + at, rounded, mask=real)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / HIDDEN + eps)
    normed = values * scale * tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    if ROUNDS:
        store_fp8_row(normed.to(residual.dtype.element_ty).to(tl.float32), y, scales, row, HIDDEN, COLUMNS)
    else:
        tl.store(y + at, normed.to(y.dtype.element_ty), mask=real)
