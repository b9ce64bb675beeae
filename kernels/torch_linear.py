"""Linears in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import Linear, joined
from .quantised import QuantisedWeight, Weight, parts_of, rounded_rows


class TorchLinear:
    """y = x W^T + bias, in the weight's dtype. ``rounds_x``: see ``QuantisedWeight``."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rounds_x: bool = False) -> None:
        self._weight = weight  # [out_features, in_features]
        self._bias = None if bias is None else bias.to(weight.dtype)
        self._rounds_x = rounds_x

    def __call__(self, x: Tensor) -> Tensor:
        wide = rounded_rows(x) if self._rounds_x else x
        return F.linear(wide.to(self._weight.dtype), self._weight, self._bias).to(x.dtype)


def linear(weight: Weight | Sequence[Weight], bias: Tensor | None) -> TorchLinear:
    rounds_x = any(isinstance(part, QuantisedWeight) and part.rounds_x for part in parts_of(weight))
    return TorchLinear(joined(weight), bias, rounds_x)


class SplitLinear:
    """Linears of one input, their outputs side by side: some quantised, others not."""

    def __init__(self, parts: Sequence[Linear], bias: Tensor | None) -> None:
        self._parts, self._bias = parts, bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.cat([part(x) for part in self._parts], 1)
        return y if self._bias is None else y.add_(self._bias)
