"""Parts of a mixture: some of its experts, as a rank with whole experts has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from splitserve.kernels.interface import Kernels
from splitserve.kernels.mixture_weights import ExpertWeights, MixtureWeights


def part_of(weights: MixtureWeights, own: range) -> MixtureWeights:
    """These experts alone; the shared one where the first is among them. Others are never read."""
    shape = replace(weights.shape, own=own, shared_size=0 if own.start else weights.shape.shared_size)
    gate_up, down = (
        None if of is None else of[own.start : own.stop]
        for of in (weights.gate_up_biases, weights.down_biases)
    )

    def expert(i: int) -> ExpertWeights:
        assert i in own or (i == shape.num_experts and shape.shared_size)
        return weights.expert(i)

    router = weights.router[: shape.num_experts + shape.gates]
    return replace(
        weights, shape=shape, router=router, expert=expert, gate_up_biases=gate_up, down_biases=down
    )


def summed_parts(kernels: Kernels, weights: MixtureWeights, x: Tensor, parts: Sequence[range]) -> Tensor:
    """float32. A row that chose none of a part's experts is 0 there, and there are such rows."""
    outputs = [kernels.mixture(part_of(weights, own))(x) for own in parts]
    assert torch.stack(outputs[1:]).eq(0).all(-1).any(), "each row chose of all parts"
    return torch.stack(outputs).float().sum(0)
