"""The layers of a vision tower, and what makes rows of embeddings of their outputs.

n: patches, D: hidden_size of the tower, H: heads, E: hidden_size of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ..model.layers import LayerLoader
from .config import VisionConfig
from .families import Activation
from .positions import Turns, side_by_side

Function = Callable[[Tensor], Tensor]
ROWS_AT_ONCE = 8192  # of the MLP: its inner rows are the widest, and of a large image many
Runs = tuple[tuple[int, int], ...]
"""Windows of one size lie side by side: their number and their size, in patches."""
ACTIVATIONS: dict[Activation, Function] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}


class Layer:
    def __init__(self, config: VisionConfig, number: int, load: LayerLoader) -> None:
        names, name = config.names, config.layer(number)
        self._num_heads = config.tower.num_heads
        self._activation = ACTIVATIONS[config.tower.activation]
        self._norms = [norm(config, f"{name}.{of}", load) for of in (names.norm_1, names.norm_2)]

        def project(of: str) -> Function:
            return linear(f"{name}.{of}", names.biases, load)

        self._order = side_by_side(config.tower.head_dim).to(load.device) if names.side_by_side else None
        self._qkv, self._o = [project(of) for of in names.qkv], project(names.o)
        self._gate = project(names.gate) if names.gate else None
        self._up, self._down = project(names.up), project(names.down)
        load.checkpoint.drop_pages()

    def __call__(self, x: Tensor, turns: Turns, runs: Runs) -> Tensor:
        x = x + self._attention(self._norms[0](x), turns, runs)
        return x + torch.cat([self._mlp(self._norms[1](part)) for part in torch.split(x, ROWS_AT_ONCE)])

    def _attention(self, x: Tensor, turns: Turns, runs: Runs) -> Tensor:
        projected = torch.cat([of(x) for of in self._qkv], dim=1).view(len(x), 3, self._num_heads, -1)
        q, k, v = projected.unbind(1)  # [n, H, D / H] each
        if self._order is not None:
            q, k = q[..., self._order], k[..., self._order]
        sizes = [number * size for number, size in runs]
        parts = (torch.split(of, sizes) for of in (turns(q), turns(k), v))
        outputs = [_attended(*run, *qkv) for run, *qkv in zip(runs, *parts, strict=True)]
        return self._o(torch.cat(outputs))

    def _mlp(self, x: Tensor) -> Tensor:
        if self._gate is None:
            return self._down(self._activation(self._up(x)))
        return self._down(self._activation(self._gate(x)) * self._up(x))


class Projector:
    """[n, D] to [n / merge_size^2, E]. ``merged``: the norm is of groups of patches, not of each."""

    def __init__(self, config: VisionConfig, name: str, load: LayerLoader, merged: bool = False) -> None:
        names, tower = config.names, config.tower
        self._merged_size, self._merged = tower.merged_size, merged
        self._norm = norm(config, f"{name}.{names.projector_norm}", load, tower.projector_eps)
        self._merge = None
        if names.merge:  # its inputs are those of one channel of all patches, then of the next
            weight = load.whole_tensor(f"{name}.{names.merge}.weight")
            weight = weight.view(len(weight), tower.hidden_size, -1).transpose(1, 2).flatten(1)
            self._merge = partial(_linear, weight=weight, bias=None)
        self._first = linear(f"{name}.{names.first}", tower.projector_bias, load)
        self._second = linear(f"{name}.{names.second}", tower.projector_bias, load)
        self._activation = ACTIVATIONS[tower.projector_activation]

    def __call__(self, x: Tensor) -> Tensor:
        x = x.view(-1, self._merged_size) if self._merged else x
        x = self._norm(x).view(-1, self._merged_size)
        x = x if self._merge is None else self._merge(x)
        return self._second(self._activation(self._first(x)))


def linear(name: str, bias: bool, load: LayerLoader) -> Function:
    weight = load.whole_tensor(f"{name}.weight").flatten(1)
    return partial(_linear, weight=weight, bias=load.whole_tensor(f"{name}.bias") if bias else None)


def norm(config: VisionConfig, name: str, load: LayerLoader, eps: float | None = None) -> Function:
    weight, eps = load.whole_tensor(f"{name}.weight"), config.names.eps if eps is None else eps
    if not config.names.layer_norms:
        return partial(_rms_norm, weight=weight, eps=eps)
    return partial(_layer_norm, weight=weight, bias=load.whole_tensor(f"{name}.bias"), eps=eps)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)


def _attended(number: int, size: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[patches, D] of q, k and v [patches, H, D / H] of ``number`` windows of ``size`` patches."""
    q, k, v = (of.view(number, size, *of.shape[1:]).transpose(1, 2) for of in (q, k, v))
    attended = functional.scaled_dot_product_attention(q, k, v)
    return attended.transpose(1, 2).reshape(number * size, -1)
