"""Loads the gated delta net of a layer (``kernels/delta_net.py``, which names the letters)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.delta_net import DeltaNetWeights
from ...kernels.interface import Linear
from ...kernels.state_shape import StatePlace
from ...kernels.states import StateInputs
from .delta_net_config import DELTA_NET, DeltaNetConfig
from .layers import LayerLoader
from .ranks import Rank


def delta_net_mixer(
    config: DeltaNetConfig, load: LayerLoader, layer: str, eps: float
) -> tuple[Linear, Callable[[Tensor, Tensor, StatePlace, StateInputs], Tensor], Linear]:
    """See ``recurrent_layer.Mixer``. ``config``: of all ranks. ``eps``: of the layer's norms."""
    name, shape = f"{layer}.{DELTA_NET}", config.of_rank(load.rank.size).shape
    weights = _weights(config, name, load, eps)

    def kernel(projected: Tensor, pool: Tensor, place: StatePlace, inputs: StateInputs) -> Tensor:
        return load.kernels.delta_net(projected, pool, place, shape, weights, inputs)

    projections = [f"{name}.{projection}" for projection in config.names.projections]
    linear = load.column(projections, False, rows_of_projections(config, load.rank))
    return linear, kernel, load.row(f"{name}.{config.names.out}", False)


def rows_of_projections(config: DeltaNetConfig, rank: Rank) -> Tensor | None:
    """Return which row of the checkpoint's projections is at each place of q, k, v, z, b and a: int64
    [outputs]; None: all in order."""
    s = config.shape
    keys, values, heads = s.num_key_heads * s.key_dim, s.num_value_heads * s.value_dim, s.num_value_heads
    if not config.by_key_heads:
        return rank.rows(keys, keys, values, values, heads, heads)
    each = heads // s.num_key_heads  # heads of values by head of keys
    sizes = [s.key_dim, s.key_dim, each * s.value_dim, each * s.value_dim]
    both = torch.arange(2 * (keys + values + heads)).tensor_split([2 * (keys + values)])
    first, second = (rows.view(s.num_key_heads, -1)[rank.part(s.num_key_heads)] for rows in both)
    return torch.cat(
        [rows.flatten() for rows in (*torch.split(first, sizes, 1), *torch.split(second, each, 1))]
    )


def _weights(config: DeltaNetConfig, name: str, load: LayerLoader, eps: float) -> DeltaNetWeights:
    shape, names, rank = config.shape, config.names, load.rank
    heads, keys = rank.part(shape.num_value_heads), shape.num_key_heads * shape.key_dim
    channels = rank.rows(keys, keys, shape.num_value_heads * shape.value_dim)
    convs = [load.whole_tensor(f"{name}.{of}.weight") for of in names.convs]
    conv = torch.cat(convs).squeeze(1)  # [channels, conv_size]
    a_log, dt = (
        load.checkpoint.tensor(f"{name}.{of}")[heads].to(load.device, torch.float32)
        for of in ("A_log", "dt_bias")
    )
    return DeltaNetWeights(
        conv=(conv if channels is None else conv[channels.to(conv.device)]).contiguous(),
        decay=a_log.exp(),
        dt=dt,
        norm=load.norm(f"{name}.{names.norm}"),
        eps=names.norm_eps or eps,
        beta_scale=config.beta_scale,
    )
