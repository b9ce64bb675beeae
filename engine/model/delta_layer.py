"""A layer of the decoder with linear attention (``decoder.py``): a gated delta net (``kernels/delta_net.py``,
which names the letters)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.delta_net import DeltaNetWeights, StateInputs, delta_net
from ...kernels.delta_net_shape import DeltaNetShape
from .config import ModelConfig
from .delta_net_config import DELTA_NET, DeltaNetConfig
from .layer_mlp import LayerMlp, ResidualNorm
from .layers import LayerLoader
from .ranks import Rank, of_rank


class DeltaLayer:
    def __init__(self, config: ModelConfig, index: int, load: LayerLoader) -> None:
        """``config``: of all ranks."""
        of, states = config.delta_net, of_rank(config, load.rank).states
        layer = config.tensors.layer.format(index)
        assert of is not None
        assert states is not None
        name = f"{layer}.{DELTA_NET}"
        self._index, self._states, self._shape = index, states, states.config.shape
        input_norm = load.norm(f"{layer}.{config.tensors.input_norm}", float(config.unit_norms))
        self._input_norm = ResidualNorm(load.kernels, input_norm, config.residual_eps)
        projections = [f"{name}.{projection}" for projection in of.projections]
        self._projections = load.column(projections, False, rows_of_projections(of, load.rank))
        self._weights = _weights(of.shape, name, load, config.rms_norm_eps)
        self._out = load.row(f"{name}.out_proj", False)
        self._mlp = LayerMlp(config, index, load)

    def run(self, hidden: Tensor | None, residual: Tensor, pool: Tensor, inputs: StateInputs) -> Tensor:
        """Write the states of the step's sequences to ``pool``; return the layer's output, not yet added to
        ``residual``.

        ``hidden`` [T, E] is the last layer's output, not yet added to ``residual`` [T, E], which takes it in.
        """
        projected = self._input_norm.into(self._projections, hidden, residual)  # [T, shape.width]
        place = self._states.place(self._index, pool.shape[4], pool.element_size())
        out = delta_net(projected, pool, place, self._shape, self._weights, inputs)
        return self._mlp(self._out(out), residual)


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


def _weights(shape: DeltaNetShape, name: str, load: LayerLoader, eps: float) -> DeltaNetWeights:
    """``shape``: of all ranks."""
    rank, heads = load.rank, load.rank.part(shape.num_value_heads)
    keys = shape.num_key_heads * shape.key_dim
    channels = rank.rows(keys, keys, shape.num_value_heads * shape.value_dim)
    conv = load.whole_tensor(f"{name}.conv1d.weight").squeeze(1)  # [channels, conv_size]
    a_log, dt = (
        load.checkpoint.tensor(f"{name}.{of}")[heads].to(load.device, torch.float32)
        for of in ("A_log", "dt_bias")
    )
    return DeltaNetWeights(
        conv=(conv if channels is None else conv[channels.to(conv.device)]).contiguous(),
        decay=a_log.exp(),
        dt=dt,
        norm=load.norm(f"{name}.norm"),
        eps=eps,
    )
