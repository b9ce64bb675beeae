"""A layer's mixture of experts: its weights, and what ``Kernels.mixture`` makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .mixture_shape import MixtureShape
from .quantised import Weight


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """An expert's matrices, as ``Kernels.linear`` takes them: gate above up [2 intermediate_size,
    hidden_size] in one or two tensors, or up alone (``num_inputs``); down: the other way round."""

    gate_up: Weight | Sequence[Weight]
    down: Weight


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """router          [num_experts, hidden_size], with one more row where there is a shared expert: its gate
    router_bias     [num_experts] or None
    expert          reads the weights of one that ``shape`` holds; number ``num_experts``: the shared one
    gate_up_biases  [experts held, outputs of gate_up] or None; such mixtures have no shared expert
    down_biases     [experts held, hidden_size] or None
    correction      float32 [num_experts] or None: added to the scores for the choice alone
    """

    shape: MixtureShape
    router: Tensor
    expert: Callable[[int], ExpertWeights]
    router_bias: Tensor | None = None
    gate_up_biases: Tensor | None = None
    down_biases: Tensor | None = None
    correction: Tensor | None = None


class Mixture(Protocol):
    """A layer's mixture of experts, [num_tokens, hidden_size] -> the same. A token's sum goes in the order of
    its experts' numbers, the shared one last; without one that is held it is 0."""

    def __call__(self, x: Tensor) -> Tensor: ...
