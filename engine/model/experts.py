"""Loads a layer's mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.interface import ExpertWeights, Mixture, MixtureWeights
from ...kernels.quantised import Weight
from .layers import LayerLoader, own_part, rows_of
from .mixture_config import MixtureConfig
from .quantised_tensors import quantised_weight
from .ranks import part_of_experts
from .split_products import Summed


def load_mixture(load: LayerLoader, layer: str, config: MixtureConfig) -> Mixture:
    """The experts of the layer of this name: of each, this rank's columns."""
    shape, names, rank = config.shape, config.names, load.rank
    own_shape = part_of_experts(shape, rank.size)

    def tensor(of: str) -> Tensor:
        return load.whole_tensor(f"{layer}.{of}")

    def expert(i: int) -> ExpertWeights:
        load.checkpoint.drop_pages()  # of the one before
        parts = [of.format(i) for of in (names.gate, names.up, names.down)]
        parts = list(names.shared) if i == shape.num_experts else parts
        gate, up, down = (f"{layer}.{part}" if part else "" for part in parts)
        both: Weight = load.stored_weight(gate)
        last: Weight = load.stored_weight(down)
        if names.stacked and i < shape.num_experts:
            assert isinstance(both, Tensor)
            assert isinstance(last, Tensor)
            both, last = both[i], last[i]
        size = len(both) // 2
        cut = [slice(size), slice(size, None)]
        halves = [both, load.stored_weight(up)] if up else [rows_of(both, half) for half in cut]
        own = [load.placed(own_part(half, rank)) for half in halves]
        return ExpertWeights(own, load.placed(load.own_columns(last, down)))

    def part(i: int) -> ExpertWeights:
        """From tensors of all experts: gate and up alternate, or each is a half."""
        load.checkpoint.drop_pages()
        gate_up, down = (_of_all(load, f"{layer}.{of}", i) for of in (names.gate, names.down))
        size = shape.intermediate_size
        cuts = (slice(size), slice(size, None)) if names.halves else (slice(0, None, 2), slice(1, None, 2))
        gate, up = (own_part(rows_of(gate_up, cut), rank) for cut in cuts)
        return ExpertWeights([gate, up], load.own_columns(down, f"{layer}.{names.down}"))

    router = tensor(f"{names.router}.weight")
    if shape.gates:
        router = torch.cat((router, tensor(f"{names.shared_gate}.weight")))
    if names.halves:
        weights = MixtureWeights(own_shape, router, part)
    elif names.up or names.stacked:
        correction = None
        if config.corrected:
            correction = load.checkpoint.tensor(f"{layer}.{names.correction}").flatten()
            correction = correction.to(load.device, torch.float32)
        weights = MixtureWeights(own_shape, router, expert, correction=correction)
    else:
        by_turns, columns = tensor(f"{names.gate}_bias"), rank.part(shape.intermediate_size)
        down = tensor(f"{names.down}_bias")
        biases = (
            tensor(f"{names.router}.bias"),
            torch.cat((by_turns[:, ::2][:, columns], by_turns[:, 1::2][:, columns]), dim=1),
            torch.zeros_like(down) if rank.number else down,
        )
        weights = MixtureWeights(own_shape, router, part, *biases)
    mixture = load.kernels.mixture(weights)
    return mixture if rank.size == 1 else Summed(mixture, rank)


def _of_all(load: LayerLoader, name: str, i: int) -> Weight:
    """Expert ``i`` in a tensor of all: inputs come before outputs where it is not quantised."""
    scheme = None if load.quantisation is None else load.quantisation.of(name)
    if scheme is None:
        return load.checkpoint.tensor(name)[i].to(load.device, load.dtype).t()
    return quantised_weight(scheme, lambda of: load.checkpoint.stored(f"{name}_{of}")[i].to(load.device))
