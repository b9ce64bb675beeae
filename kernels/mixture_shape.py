"""The shape of a mixture of experts. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped_silu", "relu_squared"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_silu", "relu_squared")
"""Numbered so in cpu/kernels.h."""


def num_inputs(activation: Activation) -> int:
    """Matrices that make what an MLP's activation gets: gate and up, or up alone."""
    return 1 if activation == "relu_squared" else 2


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """num_chosen     experts of a token: those with the largest scores; of equal ones the lower numbers
    normalized     a token's weights add up to 1 (before ``factor``)
    shared_size    intermediate size of an expert of all tokens; 0: none
    shared_gated   it is weighted by the sigmoid of its gate
    sigmoid        a score is the sigmoid of its logit, not the softmax
    num_groups     experts side by side are a group; a token's experts are of ``chosen_groups`` of them only:
                   those with the largest score, or with a correction the largest sum of two
    factor         of a token's weights
    own            the experts that are here; the parts of others are left out of the sum; None: all are
    """

    num_experts: int
    num_chosen: int
    hidden_size: int
    intermediate_size: int
    normalized: bool
    activation: Activation
    shared_size: int = 0
    shared_gated: bool = True
    sigmoid: bool = False
    num_groups: int = 1
    chosen_groups: int = 1
    factor: float = 1.0
    own: range | None = None

    @property
    def held(self) -> range:
        """Numbers of the experts that are here."""
        return range(self.num_experts) if self.own is None else self.own

    @property
    def gates(self) -> int:
        """Outputs of the router beside the experts' logits."""
        return int(self.shared_size > 0 and self.shared_gated)
