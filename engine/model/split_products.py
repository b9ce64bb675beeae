"""Products that are split among ranks, and what each does for the others: see ``ranks.py``."""

from __future__ import annotations

from torch import Tensor

from ...kernels.interface import Linear, RoundingLinear
from ...kernels.mixture_shape import Activation
from .ranks import Rank


class Summed:
    """The inputs are split, or the columns of experts: each rank's outputs are a part of the sum."""

    def __init__(self, product: Linear, rank: Rank) -> None:
        self._product, self._rank = product, rank

    def __call__(self, x: Tensor) -> Tensor:
        return self._rank.sum(self._product(x))


class _SummedRounding(RoundingLinear):
    def __init__(self, product: RoundingLinear, rank: Rank) -> None:
        self._product, self._rank = product, rank

    def __call__(self, x: Tensor) -> Tensor:
        return self._rank.sum(self._product(x))

    def of_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rank.sum(self._product.of_norm(x, residual, weight, eps))

    def of_gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return self._rank.sum(self._product.of_gate(gate_up, activation))


class Joined:
    """The outputs are split, and each rank has a part of the inputs."""

    def __init__(self, product: Linear, rank: Rank, num_inputs: int, num_outputs: int) -> None:
        self._product, self._rank = product, rank
        self._num_inputs, self._num_outputs = num_inputs, num_outputs

    def __call__(self, x: Tensor) -> Tensor:
        part = self._product(self._rank.joined(x, self._num_inputs))
        return self._rank.joined(part, self._num_outputs)


def summed(linear: Linear, rank: Rank) -> Linear:
    return _SummedRounding(linear, rank) if isinstance(linear, RoundingLinear) else Summed(linear, rank)
