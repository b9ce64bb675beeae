"""Loads a layer of Mamba-2 (``kernels/delta_net.py``, which names the letters)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.delta_net import DeltaNetWeights
from ...kernels.interface import Linear
from ...kernels.state_shape import StatePlace
from ...kernels.states import StateInputs
from .layers import LayerLoader
from .mamba_config import MambaConfig
from .ranks import Rank


def mamba_mixer(
    config: MambaConfig, load: LayerLoader, layer: str, eps: float
) -> tuple[Linear, Callable[[Tensor, Tensor, StatePlace, StateInputs], Tensor], Linear]:
    """See ``recurrent_layer.Mixer``. ``config``: of all ranks. ``eps``: of the norm."""
    name, rank, shape = f"{layer}.{config.name}", load.rank, config.of_rank(load.rank.size).shape
    weights, normed = _weights(config, name, load), _norm(config, name, load, eps)

    def kernel(projected: Tensor, pool: Tensor, place: StatePlace, inputs: StateInputs) -> Tensor:
        return normed(load.kernels.delta_net(projected, pool, place, shape, weights, inputs))

    projections = load.column([f"{name}.in_proj"], config.bias, rows_of_projection(config, rank))
    return projections, kernel, load.row(f"{name}.out_proj", config.bias)


def rows_of_projection(config: MambaConfig, rank: Rank) -> Tensor:
    """Return which row of the checkpoint's projection (z, x, B, C, time steps) is at each place of q, k, v, z
    and a: int64 [outputs]."""
    s = config.shape
    inner = s.num_value_heads * s.value_dim
    gates, _, steps = torch.split(torch.arange(s.width), [inner, s.channels, s.num_value_heads])
    own = rank.part(s.num_value_heads)
    return torch.cat(
        [inner + _channels(config, rank), gates.view(-1, s.value_dim)[own].flatten(), steps[own]]
    )


def _channels(config: MambaConfig, rank: Rank) -> Tensor:
    """Which channel of the checkpoint's convolution (x, B, C) is at each place of q, k and v: int64."""
    s = config.shape
    keys = s.num_key_heads * s.key_dim
    x, b, c = torch.split(torch.arange(s.channels), [s.num_value_heads * s.value_dim, keys, keys])
    groups, own = rank.kv_heads(s.num_key_heads), rank.part(s.num_value_heads)
    parts = [of.view(-1, s.key_dim)[groups] for of in (c, b)], x.view(-1, s.value_dim)[own]
    return torch.cat([part.flatten() for part in (*parts[0], parts[1])])


def _weights(config: MambaConfig, name: str, load: LayerLoader) -> DeltaNetWeights:
    own, channels = load.rank.part(config.shape.num_value_heads), _channels(config, load.rank)

    def wide(of: str, part: slice | Tensor) -> Tensor:
        return load.checkpoint.tensor(f"{name}.{of}")[part].to(load.device, torch.float32)

    conv = load.whole_tensor(f"{name}.conv1d.weight").squeeze(1)
    return DeltaNetWeights(
        conv=conv[channels.to(conv.device)].contiguous(),
        conv_bias=wide("conv1d.bias", channels) if config.conv_bias else None,
        decay=wide("A_log", own).exp(),
        dt=wide("dt_bias", own),
        skip=wide("D", own),
    )


def _norm(config: MambaConfig, name: str, load: LayerLoader, eps: float) -> Callable[[Tensor], Tensor]:
    """RMSNorm of the heads [T, Hv Dv] that share a key head, which may be of several ranks."""
    rank, kernels, groups = load.rank, load.kernels, config.shape.num_key_heads
    weight = load.norm(f"{name}.norm")
    width, own = len(weight), rank.part(len(weight))
    ones = torch.ones_like(weight[: width // groups])

    def normed(x: Tensor) -> Tensor:
        if groups % rank.size == 0:
            return kernels.rms_norm(x.view(-1, len(ones)), ones, eps).view_as(x) * weight[own]
        whole = rank.joined(x, width)
        whole = kernels.rms_norm(whole.view(-1, len(ones)), ones, eps).view_as(whole)
        return whole[:, own] * weight[own]

    return normed
