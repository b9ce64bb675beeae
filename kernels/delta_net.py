"""Linear attention over a state that lies in the blocks of the KV pool, by the gated delta rule (Yang et al.,
Gated Delta Networks, 2024) or Mamba-2's (Dao and Gu, Transformers are SSMs, 2024).

    x     = silu(causal depthwise convolution of q, k and v, and its bias)
    S     = exp(g) S;  S += k (beta (v - S' k))';  o = S' q       g = -exp(A) softplus(a + dt),
                                                                  beta = beta_scale sigmoid(b)
    out   = norm(o) weight silu(z)
    Mamba-2:
    S     = exp(g) S + k (beta v)';  o = S' q + skip v            beta = softplus(a + dt)
    out   = o silu(z)

q and k of each head are divided by their length, q by sqrt(Dk) as well, but not Mamba-2's (its C and B); each
serves Hv / Hk consecutive value heads. All of it in float32; a token's sums are taken in an order that no
other token changes, so that a prompt's chunks give the same bits as the whole.

Hk, Hv: heads of keys and of values; Dk, Dv: their sizes; KVH: key-value heads of the layers with attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from .delta_net_shape import DeltaNetShape as DeltaNetShape
from .state_shape import NO_STATE, PADDING, StatePlace
from .states import StateInputs, read_state, write_state

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """conv     [channels, conv_size], as norm of the activations' type or float32
    decay    float32 [Hv]: exp(A)
    dt       float32 [Hv]
    norm     [Dv]; of the delta rule
    beta_scale  beta is as many times the sigmoid of b
    conv_bias   float32 [channels], or None
    skip        float32 [Hv]; of Mamba-2
    """

    conv: Tensor
    decay: Tensor
    dt: Tensor
    norm: Tensor | None = None
    eps: float = 0.0
    beta_scale: float = 1.0
    conv_bias: Tensor | None = None
    skip: Tensor | None = None


def delta_net(
    projected: Tensor,
    pool: Tensor,
    place: StatePlace,
    shape: DeltaNetShape,
    weights: DeltaNetWeights,
    inputs: StateInputs,
) -> Tensor:
    """The reference. ``projected`` [T, shape.width] -> [T, Hv Dv] of the same type; reads and writes the
    states in ``pool``."""
    out = projected.new_zeros(len(projected), shape.num_value_heads * shape.value_dim)
    starts = inputs.query_start_loc.tolist()
    for i, (source, mark) in enumerate(zip(inputs.source.tolist(), inputs.marks.tolist(), strict=True)):
        if source == PADDING:
            continue
        tables = inputs.tables[i].long()
        state, newest = (
            _zeros(shape, pool) if source == NO_STATE else read_heads(pool, place, tables[source], shape)
        )
        copy = 0 if source == NO_STATE else 1 - source
        end = starts[i] + mark if mark else starts[i]
        for first, last, to in ((starts[i], end, 2), (end, starts[i + 1], copy)):
            for t in range(first, last):  # one by one: torch's vectors give a number bits by its place
                out[t : t + 1], newest = _run(projected[t : t + 1], state, newest, shape, weights)
            if first < last or to == copy:
                write_heads(pool, place, tables[to], shape, state, newest)
    return out


def _run(
    projected: Tensor, state: Tensor, newest: Tensor, shape: DeltaNetShape, weights: DeltaNetWeights
) -> tuple[Tensor, Tensor]:
    """Some tokens of one sequence: their output, and the newest inputs of the convolution. Changes ``state``
    in place."""
    num_keys, num_values = shape.num_key_heads, shape.num_value_heads
    x = projected.float()
    sizes = [shape.channels, num_values * shape.value_dim, num_values * shape.delta_rule, num_values]
    mixed, z, b, a = torch.split(x, sizes, dim=1)
    seen = torch.cat([newest, mixed])
    conv, bias = weights.conv.float(), torch.zeros(()) if weights.conv_bias is None else weights.conv_bias
    mixed = silu(sum((seen[j : j + len(x)] * conv[:, j] for j in range(shape.conv_size)), bias))
    keys = num_keys * shape.key_dim
    q, k, v = torch.split(mixed, [keys, keys, num_values * shape.value_dim], dim=1)
    q, k = (of.view(len(x), num_keys, shape.key_dim) for of in (q, k))
    if shape.delta_rule:
        q, k = (of * torch.rsqrt((of * of).sum(-1, keepdim=True) + L2_EPS) for of in (q, k))
        q = q / shape.key_dim**0.5
    q, k = (of.repeat_interleave(num_values // num_keys, dim=1) for of in (q, k))
    v, z = (of.view(len(x), num_values, shape.value_dim) for of in (v, z))
    step = softplus(a + weights.dt)
    decay = (-weights.decay * step).exp()
    beta = weights.beta_scale * b.sigmoid() if shape.delta_rule else step
    o = torch.empty_like(v)
    for t in range(len(x)):
        state *= decay[t, :, None, None]
        old = (state * k[t, :, :, None]).sum(1) if shape.delta_rule else 0.0
        delta = (v[t] - old) * beta[t, :, None]
        state += k[t, :, :, None] * delta[:, None, :]
        o[t] = (state * q[t, :, :, None]).sum(1)
    if weights.skip is not None:
        return ((o + weights.skip[:, None] * v) * silu(z)).to(projected.dtype).flatten(1), seen[len(x) :]
    assert weights.norm is not None
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + weights.eps)
    o = weights.norm.float() * o.to(projected.dtype).float() * silu(z)
    return o.to(projected.dtype).flatten(1), seen[len(x) :]


def _zeros(shape: DeltaNetShape, pool: Tensor) -> tuple[Tensor, Tensor]:
    sizes = (shape.num_value_heads, shape.key_dim, shape.value_dim), (shape.conv_size - 1, shape.channels)
    first, second = (torch.zeros(size, device=pool.device) for size in sizes)
    return first, second


def read_heads(
    pool: Tensor, place: StatePlace, blocks: Tensor, shape: DeltaNetShape
) -> tuple[Tensor, Tensor]:
    """State [Hv, Dk, Dv] and inputs of the convolution [conv_size - 1, channels]."""
    num_kv_heads = pool.shape[3]
    part = shape.of_head(num_kv_heads)
    floats = read_state(pool, place, blocks, shape)
    size = part.num_value_heads * part.key_dim * part.value_dim
    state = floats[:, :size].reshape(shape.num_value_heads, shape.key_dim, shape.value_dim)
    newest = floats[:, size:].view(num_kv_heads, part.conv_size - 1, part.channels)
    keys = part.num_key_heads * part.key_dim
    q, k, v = torch.split(newest, [keys, keys, part.num_value_heads * part.value_dim], dim=2)
    with_same = max(1, num_kv_heads // shape.num_key_heads)  # heads that have the same key head
    parts = q[::with_same], k[::with_same], v
    return state, torch.cat([of.movedim(0, 1).flatten(1) for of in parts], dim=1)


def write_heads(
    pool: Tensor, place: StatePlace, blocks: Tensor, shape: DeltaNetShape, state: Tensor, newest: Tensor
) -> None:
    """``state``, ``newest``: as ``read_heads`` returns them."""
    num_kv_heads = pool.shape[3]
    keys = shape.num_key_heads * shape.key_dim
    q, k, v = torch.split(newest, [keys, keys, shape.num_value_heads * shape.value_dim], dim=1)
    with_same = max(1, num_kv_heads // shape.num_key_heads)
    q, k = (
        of.view(len(newest), num_kv_heads // with_same, -1).repeat_interleave(with_same, 1) for of in (q, k)
    )
    heads = torch.cat([q, k, v.view(len(newest), num_kv_heads, -1)], dim=2).movedim(1, 0)
    floats = torch.cat([state.reshape(num_kv_heads, -1), heads.reshape(num_kv_heads, -1)], dim=1)
    write_state(pool, place, blocks, shape, floats)
