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
from .names import GATED, Activation
from .positions import side_by_side

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
        qkv_biases = names.biases and names.qkv_biases
        self._qkv = [linear(f"{name}.{of}", qkv_biases, load) for of in names.qkv]
        self._qk_norms = [rms_norm(f"{name}.{of}", load) for of in names.qk_norms]
        self._scales = [load.whole_tensor(f"{name}.{of}") for of in names.scales]
        self._o = project(names.o)
        self._gate = project(names.gate) if names.gate else None
        self._up, self._down = project(names.up), project(names.down)
        load.checkpoint.drop_pages()

    def __call__(self, x: Tensor, turns: Function, runs: Runs) -> Tensor:
        x = x + self._scaled(0, self._attention(self._norms[0](x), turns, runs))
        parts = [self._mlp(self._norms[1](part)) for part in torch.split(x, ROWS_AT_ONCE)]
        return x + self._scaled(1, torch.cat(parts))

    def _scaled(self, number: int, x: Tensor) -> Tensor:
        return x * self._scales[number].to(x.dtype) if self._scales else x

    def _attention(self, x: Tensor, turns: Function, runs: Runs) -> Tensor:
        projected = [of(x) for of in self._qkv]
        for i, normed in enumerate(self._qk_norms):
            projected[i] = normed(projected[i])
        q, k, v = torch.cat(projected, dim=1).view(len(x), 3, self._num_heads, -1).unbind(1)  # [n, H, D / H]
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
        of_norm = layer_norm if names.layer_norms or names.merged_norm else rms_norm
        self._norm = of_norm(f"{name}.{names.projector_norm}", load, tower.projector_eps)
        self._merge = None
        if names.merge:
            weight = _by_patch(load.whole_tensor(f"{name}.{names.merge}.weight"), tower.hidden_size)
            self._merge = partial(_linear, weight=weight, bias=None)
        self._first = linear(f"{name}.{names.first}", tower.projector_bias, load)
        self._second = linear(f"{name}.{names.second}", tower.projector_bias, load)
        self._activation = ACTIVATIONS[tower.projector_activation]

    def __call__(self, x: Tensor) -> Tensor:
        x = x.view(-1, self._merged_size) if self._merged else x
        x = self._norm(x).view(-1, self._merged_size)
        x = x if self._merge is None else self._merge(x)
        return self._second(self._activation(self._first(x)))


class GatedProjector:
    """As ``Projector``: down(act(gate(y)) * up(y)) of y = gelu(norm(first(merge(x))))."""

    def __init__(self, config: VisionConfig, load: LayerLoader) -> None:
        names, tower, name = config.names, config.tower, f"{config.prefix}{config.names.projector}"
        self._merged_size, self._activation = tower.merged_size, ACTIVATIONS[tower.activation]
        weight, bias = (load.whole_tensor(f"{config.prefix}{names.merge}.{of}") for of in ("weight", "bias"))
        self._merge = partial(_linear, weight=_by_patch(weight, tower.hidden_size), bias=bias)
        self._norm = layer_norm(f"{name}.{names.projector_norm}", load, tower.projector_eps)
        self._first, self._gate, self._up, self._down = (
            linear(f"{name}.{of}", False, load) for of in (names.first, *GATED, names.second)
        )

    def __call__(self, x: Tensor) -> Tensor:
        x = self._first(self._merge(x.view(-1, self._merged_size)))
        x = functional.gelu(self._norm(x))
        return self._down(self._activation(self._gate(x)) * self._up(x))


def _by_patch(weight: Tensor, size: int) -> Tensor:
    """[outputs, inputs] of a weight whose inputs are a channel of all patches, of ``size``, then the next."""
    return weight.view(len(weight), size, -1).transpose(1, 2).flatten(1)


def linear(name: str, bias: bool, load: LayerLoader) -> Function:
    weight = load.whole_tensor(f"{name}.weight").flatten(1)
    return partial(_linear, weight=weight, bias=load.whole_tensor(f"{name}.bias") if bias else None)


def norm(config: VisionConfig, name: str, load: LayerLoader) -> Function:
    """Return a norm like those of the layers."""
    return (layer_norm if config.names.layer_norms else rms_norm)(name, load, config.names.eps)


def layer_norm(name: str, load: LayerLoader, eps: float) -> Function:
    weight, bias = (load.whole_tensor(f"{name}.{of}") for of in ("weight", "bias"))
    return partial(_layer_norm, weight=weight, bias=bias, eps=eps)


def rms_norm(name: str, load: LayerLoader, eps: float = 1e-6) -> Function:
    return partial(_rms_norm, weight=load.whole_tensor(f"{name}.weight"), eps=eps)


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
