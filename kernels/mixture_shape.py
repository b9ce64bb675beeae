"""The shape of a mixture of experts. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_silu")  # numbered so in cpu/kernels.h


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """num_chosen   experts of a token: those with the largest logits; of equal ones the lower numbers
    normalized   a token's weights add up to 1: softmax over its experts, not over all
    shared_size  intermediate size of an expert of all tokens, weighted by the sigmoid of its gate; 0: none
    """

    num_experts: int
    num_chosen: int
    hidden_size: int
    intermediate_size: int
    normalized: bool
    activation: Activation
    shared_size: int = 0
