"""Loads a layer's mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.mixture_weights import ExpertWeights, Mixture, MixtureWeights
from ...kernels.quantised import Weight
from ..errors import ModelConfigError
from .layers import LayerLoader, own_part, rows_of
from .mixture_config import MixtureConfig
from .quantised_tensors import quantised_weight
from .ranks import own_experts
from .split_products import Summed

ReadExpert = Callable[[int], ExpertWeights]


def load_mixture(load: LayerLoader, layer: str, config: MixtureConfig) -> Mixture:
    """The experts of the layer of this name: this rank's columns of each, or those that it has whole."""
    shape, names, rank = config.shape, config.names, load.rank
    own_shape = own_experts(config, rank)

    def tensor(of: str) -> Tensor:
        return load.whole_tensor(f"{layer}.{of}")

    def own(halves: Sequence[Weight], down: Weight, name: str, whole: bool) -> ExpertWeights:
        if not whole:
            halves = [own_part(half, rank) for half in halves]
            is_shared = name == f"{layer}.{names.shared[2]}"
            down = load.own_columns(down, name, "" if is_shared else "--expert-parallel")
        return ExpertWeights([load.placed(half) for half in halves], load.placed(down))

    def named(parts: Sequence[str], whole: bool) -> ExpertWeights:
        """From tensors of its own. Without one for up, the first holds gate above up."""
        *inputs, down = (f"{layer}.{of}" if of else "" for of in parts)
        halves = [load.stored_weight(of) for of in inputs if of]
        return own(halves if inputs[1] else _halves(halves[0]), load.stored_weight(down), down, whole)

    def part(i: int) -> ExpertWeights:
        """From tensors of all experts: gate and up by turns, or gate above up."""
        gate_up, down = (_of_all(load, f"{layer}.{of}", i, names.stacked) for of in (names.gate, names.down))
        name = f"{layer}.{names.down}"
        return own(_halves(gate_up, names.by_turns), down, name, config.whole_experts)

    def expert(i: int) -> ExpertWeights:
        load.checkpoint.drop_pages()  # of the one before
        if i == shape.num_experts:
            return named(names.shared, config.whole_shared)
        parts = [of.format(i) for of in (names.gate, names.up, names.down)]
        return named(parts, config.whole_experts) if names.up else part(i)

    router = tensor(f"{names.router}.weight")
    read: ReadExpert = expert
    if names.beside:
        router, read = _scaled(load, layer, config, router, expert)
    if own_shape.gates:
        router = torch.cat((router, tensor(f"{names.shared_gate}.weight")))
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = None, None, None
    if names.by_turns:
        held = slice(own_shape.held.start, own_shape.held.stop)
        by_turns, down = (tensor(f"{of}_bias")[held] for of in (names.gate, names.down))
        columns = slice(None) if config.whole_experts else rank.part(shape.intermediate_size)
        biases = (
            tensor(f"{names.router}.bias"),
            torch.cat((by_turns[:, ::2][:, columns], by_turns[:, 1::2][:, columns]), dim=1),
            torch.zeros_like(down) if rank.number and not config.whole_experts else down,
        )
    correction = _correction(load, layer, config) if config.corrected else None
    weights = MixtureWeights(own_shape, router, read, *biases, correction)
    mixture = load.kernels.mixture(weights)
    return mixture if rank.size == 1 else Summed(mixture, rank)


def _correction(load: LayerLoader, layer: str, config: MixtureConfig) -> Tensor:
    names, name = config.names, f"{layer}.{config.names.correction}"
    if not names.correction or (names.may_lack_correction and not load.checkpoint.has(name)):
        return torch.zeros(config.shape.num_experts, device=load.device)
    return load.checkpoint.tensor(name).flatten().to(load.device, torch.float32)


def _scaled(
    load: LayerLoader, layer: str, config: MixtureConfig, router: Tensor, expert: ReadExpert
) -> tuple[Tensor, ReadExpert]:
    """Return the router for the experts' input, whose norm has other weights than its own, and the experts
    with their factors."""
    names = config.names
    assert names.beside is not None
    of_input, of_router, of_experts = (
        load.checkpoint.tensor(f"{layer}.{of}").float()
        for of in (f"{names.beside[1]}.weight", names.router_scale, names.expert_scale)
    )
    if not of_input.all():
        raise ModelConfigError(f"{layer}.{names.beside[1]}.weight has zeros: its router is not built")
    factors = of_router * config.shape.hidden_size**-0.5 / of_input

    def scaled(i: int) -> ExpertWeights:
        of = expert(i)
        down = of.down
        if isinstance(down, Tensor):
            return replace(of, down=(down.float() * of_experts[i].item()).to(down.dtype))
        return replace(of, down=replace(down, scales=down.scales * of_experts[i].item()))

    return (router.float() * factors.to(router.device)).to(router.dtype), scaled


def _halves(rows: Weight, by_turns: bool = False) -> list[Weight]:
    size = len(rows) // 2
    cuts = (slice(0, None, 2), slice(1, None, 2)) if by_turns else (slice(size), slice(size, None))
    return [rows_of(rows, cut) for cut in cuts]


def _of_all(load: LayerLoader, name: str, i: int, stacked: bool) -> Weight:
    """Expert ``i`` in a tensor of all: inputs come before outputs where it is neither ``stacked`` nor
    quantised."""
    scheme = None if load.quantisation is None else load.quantisation.of(name.removesuffix(".weight"))
    if scheme is None:
        weight = load.checkpoint.tensor(name)[i].to(load.device, load.dtype)
        return weight if stacked else weight.t()

    def read(of: str) -> Tensor:
        """Parts of a weight are named by the tensor of all: ``gate_up_proj``, ``gate_up_proj_scale_inv``."""
        full = name if of == "weight" else f"{name}_{of.removeprefix('weight_')}"
        return load.checkpoint.stored(full)[i].to(load.device)

    return quantised_weight(scheme, read)
