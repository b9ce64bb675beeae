"""Linear layers in float8_e4m3fn by torch's scaled product: half the bytes of a decode step's weights, twice
the rate of a prefill.

    y = (x / a) (W / b)^T * a b + bias        a, b such that the largest value is 448

``per_channel``: a scale for each row of x and of W; otherwise one for each of them as a whole. The weights'
scales are taken once, those of x in each call, on the device. y is rounded to bfloat16, the one type that
torch gives with a scale a row on all GPUs. Bytes: out_features in_features; FLOPs: 2 num_tokens out_features
in_features. The products need a GPU with float8 instructions (Ada, Hopper or later).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import E4M3_LARGEST

SMALLEST_SCALE = 1e-12
SLICE_BYTES = 32 << 20  # of a weight as float32, quantised at a time
MULTIPLE = 16  # of in_features and out_features, for torch's scaled product


class Fp8Linear:
    """See ``interface.Linear``."""

    def __init__(
        self, weight: Tensor | Sequence[Tensor], bias: Tensor | None, per_channel: bool = True
    ) -> None:
        """``weight``: one matrix, or several whose outputs stand side by side. They are quantised by
        slices of rows: beside them and the result that takes at most three times SLICE_BYTES."""
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        out_features, in_features = sum(map(len, parts)), parts[0].shape[1]
        assert out_features % MULTIPLE == in_features % MULTIPLE == 0, (
            f"{out_features} x {in_features}: not multiples of {MULTIPLE}"
        )
        step = max(1, SLICE_BYTES // (4 * in_features))
        slices = [rows for part in parts for rows in part.split(step)]
        largest = torch.cat([rows.float().abs_().amax(dim=1, keepdim=True) for rows in slices])
        if not per_channel:
            largest = largest.amax(dim=0, keepdim=True)
        self._scales = (largest / E4M3_LARGEST).clamp(min=SMALLEST_SCALE)  # [out_features or 1, 1]
        self._weight = parts[0].new_empty((out_features, in_features), dtype=torch.float8_e4m3fn)
        start = 0
        for rows in slices:
            end = start + len(rows)
            scales = self._scales[start:end] if per_channel else self._scales
            quantized = (rows.float() / scales).clamp_(-E4M3_LARGEST, E4M3_LARGEST)
            self._weight[start:end] = quantized.to(torch.float8_e4m3fn)
            start = end
        self._bias = None if bias is None else bias.bfloat16()
        self._per_channel = per_channel

    def __call__(self, x: Tensor) -> Tensor:
        quantized, scales = quantize_rows(x) if self._per_channel else quantize_whole(x)
        weight_scales = self._scales.t() if self._per_channel else self._scales.view(())
        y = torch._scaled_mm(
            quantized,
            self._weight.t(),
            scales,
            weight_scales,
            bias=self._bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,  # summed in the tensor cores
        )
        return y.to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [num_tokens, n] -> float8_e4m3fn of the same shape, its scales float32 [num_tokens, 1]."""
    rows, n = x.shape
    assert x.stride(1) == 1
    quantized = torch.empty((rows, n), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _quantize_kernel[(rows,)](
        x, quantized, scales, x.stride(0), N=n, COLUMNS=triton.next_power_of_2(n), num_warps=8
    )
    return quantized, scales


def quantize_whole(x: Tensor) -> tuple[Tensor, Tensor]:
    """With one scale, float32 []."""
    scale = (x.abs().amax().float() / E4M3_LARGEST).clamp(min=SMALLEST_SCALE)
    return (x.float() / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn), scale


@triton.jit
def _quantize_kernel(x, quantized, scales, stride, N: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    values = tl.load(x + row * stride + columns, mask=columns < N, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), 0), 448.0), 1e-12)
    tl.store(scales + row, scale)
    scaled = tl.minimum(tl.maximum(tl.div_rn(values, scale), -448.0), 448.0)
    tl.store(quantized + row * N + columns, scaled.to(quantized.dtype.element_ty), mask=columns < N)
