"""Loads the short convolution of a layer (``kernels/short_conv.py``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.interface import Linear
from ...kernels.short_conv import ShortConvWeights
from ...kernels.state_shape import StatePlace
from ...kernels.states import StateInputs
from .layers import LayerLoader
from .short_conv_config import SHORT_CONV, ShortConvConfig


def short_conv_mixer(
    config: ShortConvConfig, load: LayerLoader, layer: str
) -> tuple[Linear, Callable[[Tensor, Tensor, StatePlace, StateInputs], Tensor], Linear]:
    """See ``recurrent_layer.Mixer``. ``config``: of all ranks."""
    rank, name, channels = load.rank, f"{layer}.{SHORT_CONV}", config.shape.channels
    shape, own = config.of_rank(rank.size).shape, rank.part(channels)

    def wide(of: str) -> Tensor:
        return load.checkpoint.tensor(f"{name}.conv.{of}")[own].to(load.device, load.dtype).to(torch.float32)

    conv = wide("weight").squeeze(1).t().contiguous()
    weights = ShortConvWeights(conv, wide("bias").contiguous() if config.bias else None)

    def kernel(projected: Tensor, pool: Tensor, place: StatePlace, inputs: StateInputs) -> Tensor:
        return load.kernels.short_conv(projected, pool, place, shape, weights, inputs)

    projections = load.column([f"{name}.in_proj"], config.bias, rank.rows(channels, channels, channels))
    return projections, kernel, load.row(f"{name}.out_proj", config.bias)
