"""Linear layers in float8_e4m3fn by torch's scaled product: half the bytes of a decode step's weights, twice
the rate of a prefill.

    y = (x / a) (W / b)^T * a b + bias        a, b of each row such that its largest value is 448

The weights' scales are taken once, those of x in each call, on the device: by the kernel that makes x where
that is a norm or the MLP's gate. y is rounded to bfloat16, the one type that torch gives with a scale a row
on all GPUs. Bytes: out_features in_features; FLOPs: 2 num_tokens out_features in_features. The products
need a GPU with float8 instructions (Ada, Hopper or later).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..interface import RoundingLinear
from ..mixture_shape import Activation
from ..reference import E4M3_LARGEST
from .elementwise import gate_fp8
from .fp8_rows import Fp8Rows, fp8_rows
from .norm import norm_fp8

SMALLEST_SCALE = 1e-12
SLICE_BYTES = 32 << 20  # of a weight as float32, quantised at a time
MULTIPLE = 16  # of in_features and out_features, for torch's scaled product


class Fp8Linear(RoundingLinear):
    def __init__(self, weight: Tensor | Sequence[Tensor], bias: Tensor | None) -> None:
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
        self._scales = (largest / E4M3_LARGEST).clamp(min=SMALLEST_SCALE)  # [out_features, 1]
        self._weight = parts[0].new_empty((out_features, in_features), dtype=torch.float8_e4m3fn)
        start = 0
        for rows in slices:
            end = start + len(rows)
            quantized = (rows.float() / self._scales[start:end]).clamp_(-E4M3_LARGEST, E4M3_LARGEST)
            self._weight[start:end] = quantized.to(torch.float8_e4m3fn)
            start = end
        self._bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(fp8_rows(x), x.dtype)

    def of_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._product(norm_fp8(x, residual, weight, eps), residual.dtype)

    def of_gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return self._product(gate_fp8(gate_up, activation), gate_up.dtype)

    def _product(self, x: Fp8Rows, dtype: torch.dtype) -> Tensor:
        quantized, scales = x
        y = torch._scaled_mm(
            quantized,
            self._weight.t(),
            scales,
            self._scales.t(),
            bias=self._bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,  # summed in the tensor cores
        )
        return y.to(dtype)
