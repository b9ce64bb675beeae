"""The kernels in plain torch: what every native kernel is tested against, and what runs where there is none.

Correct on any device and dtype, in float32 inside. Not fast: attention gathers a sequence's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .delta_net import delta_net
from .gumbel_noise import gumbel_noise
from .interface import INT8_SCALE_BYTES, AttentionInputs, LayerParts, Linear, RopeInputs
from .low_rank import TorchLowRank
from .mixture_shape import Activation, MixtureShape
from .mixture_weights import MixtureWeights
from .quantised import Weight
from .short_conv import short_conv
from .sparse_index import index_slots
from .torch_linear import TorchLinear, linear

E4M3_LARGEST = 448.0
CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0  # of gpt-oss's gate


class TorchMixture:
    """y = sum of weight * down(act(gate) * up) over a token's experts, in float32. Quantised weights of the
    experts that are chosen are dequantised for each call."""

    def __init__(self, weights: MixtureWeights) -> None:
        self._weights, self._shape = weights, weights.shape
        self._router = TorchLinear(weights.router, weights.router_bias)
        shape, held = weights.shape, weights.shape.held
        numbers = [*held, shape.num_experts] if shape.shared_size else held
        self._experts = {i: weights.expert(i) for i in numbers}

    def __call__(self, x: Tensor) -> Tensor:
        shape, logits = self._shape, self._router(x)
        experts, weights = routes(logits[:, : shape.num_experts], shape, self._weights.correction)
        total = torch.zeros_like(x, dtype=torch.float32)
        for i in sorted(set(experts.flatten().tolist()) & set(shape.held)):
            rows, places = torch.where(experts == i)
            total[rows] += weights[rows, places, None] * self._mlp(i, x[rows])
        if shape.shared_size:
            gate = logits[:, shape.num_experts :].float().sigmoid() if shape.shared_gated else 1.0
            total += gate * self._mlp(shape.num_experts, x)
        return total.to(x.dtype)

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        w, expert = self._weights, self._experts[i]
        place = i - w.shape.held.start
        biases = [None if of is None else of[place] for of in (w.gate_up_biases, w.down_biases)]
        activated = gated(linear(expert.gate_up, biases[0])(x), w.shape.activation)
        return linear(expert.down, biases[1])(activated).float()


def routes(logits: Tensor, shape: MixtureShape, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [num_tokens, num_experts] -> each token's experts, ascending, int64 [num_tokens, num_chosen],
    and their weights, float32."""
    wide = logits.float()
    scored = shape.sigmoid or correction is not None
    scores = wide.sigmoid() if shape.sigmoid else wide.softmax(-1)
    choice = scores if scored else wide
    if correction is not None:
        choice = choice + correction
    if shape.num_groups > 1:
        groups = choice.unflatten(1, (shape.num_groups, -1))  # type: ignore[no-untyped-call]
        best = groups.amax(-1) if correction is None else groups.topk(2).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : shape.chosen_groups]
        left_out = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        choice = groups.masked_fill(left_out[..., None], -torch.inf).flatten(1)
    order = choice.sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, : shape.num_chosen].sort(dim=-1).values
    if scored:
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) if shape.normalized else 1.0)
    elif shape.normalized:
        weights = wide.gather(1, chosen).softmax(-1)
    else:
        weights = wide.softmax(-1).gather(1, chosen)
    return chosen, weights * shape.factor


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    if activation == "relu_squared":
        return F.relu(gate_up).square()
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_silu":
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gate * torch.sigmoid(gate * CLAMPED_SLOPE) * (up + 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


class TorchKernels:
    """See ``interface.Kernels`` for the contracts."""

    key_group = 1

    def linear(self, weight: Weight | Sequence[Weight], bias: Tensor | None, as_is: bool = False) -> Linear:
        return linear(weight, bias)

    def mixture(self, weights: MixtureWeights) -> TorchMixture:
        return TorchMixture(weights)

    def head(self, weight: Weight) -> Linear:
        return self.linear(weight, None)

    def low_rank(
        self, in_features: int, out_features: int, max_rank: int, num_slots: int, dtype: torch.dtype,
        device: torch.device,
    ) -> TorchLowRank:  # fmt: skip
        return TorchLowRank()

    def embedding(self, table: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return table.index_select(0, token_ids).to(dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return _rms_norm(residual, weight, eps)

    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)

    def rope_and_store(self, qkv: Tensor, pool: Tensor, layer: int, rope: RopeInputs) -> Tensor:
        q, k, v = split_qkv(qkv, rope.num_heads, rope.num_kv_heads, rope.head_dim)
        if rope.q_norm is not None and rope.k_norm is not None:
            q = _norm_of_heads(q, rope.q_norm, rope.norm_eps)
            k = _norm_of_heads(k, rope.k_norm, rope.norm_eps)
        angles = rope.cos_sin[rope.positions.long()].unsqueeze(1)  # [num_tokens, 1, head_dim]
        block_size = pool.shape[4]
        written = rope.slot_mapping >= 0
        blocks, offsets = rope.slot_mapping[written] // block_size, rope.slot_mapping[written] % block_size
        k, v = rotate(k, angles)[written], v[written]
        if rope.kv_scales is not None:
            k, v = (quantize_e4m3(x, rope.kv_scales[layer, i]) for i, x in enumerate((k, v)))
        if pool.dtype == torch.int8:
            k, v = quantize_int8(k), quantize_int8(v)
        pool[blocks, layer, 0, :, offsets] = k
        if pool.shape[2] == 2:
            pool[blocks, layer, 1, :, offsets] = v
        return rotate(q, angles)

    def paged_attention(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        out = torch.empty_like(q)
        starts = inputs.query_start_loc.tolist()
        for i, length in enumerate(inputs.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            keys, values = self._keys_and_values(q, pool, layer, inputs, inputs.block_tables[i], length)
            out[rows] = attention(q[rows], keys, values, inputs)
        return out.flatten(1)

    def _keys_and_values(
        self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs, table: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """One sequence's, each [length, num_kv_heads, head_dim], in the type of ``q``."""
        keys, values = gather_kv(pool, layer, table, length, inputs.slots)
        if inputs.kv_scales is not None:
            keys, values = (
                (x.float() * scale[:, None]).to(q.dtype)
                for x, scale in zip((keys, values), inputs.kv_scales[layer], strict=True)
            )
        if pool.dtype == torch.int8:
            keys, values = dequantize_int8(keys).to(q.dtype), dequantize_int8(values).to(q.dtype)
        return keys, values

    def partial_attention(
        self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        lse, empty = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32), inputs.seq_lens == 0
        for i, length in enumerate(inputs.seq_lens.tolist()):
            if length:
                keys = self._keys_and_values(q, pool, layer, inputs, inputs.block_tables[i], length)[0]
                lse[i] = (q[i].float() @ keys[:, 0].float().t() * inputs.scale).logsumexp(-1)
        return self.paged_attention(q, pool, layer, inputs).masked_fill(empty[:, None], 0.0), lse

    delta_net, short_conv = staticmethod(delta_net), staticmethod(short_conv)
    index_slots = staticmethod(index_slots)

    def use_this_thread(self) -> None:
        """No thread has settings of its own."""

    def fuse_layers(self, layers: Sequence[LayerParts], eps: float) -> None:
        """One call after the other it is."""

    def gumbel_argmax(self, logits: Tensor, keys: Tensor) -> Tensor:
        token_ids = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
        return (logits + gumbel_noise(keys, token_ids)).argmax(dim=-1)


def split_qkv(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """[num_tokens, (num_heads + 2 num_kv_heads) head_dim] -> q [num_tokens, num_heads, head_dim], k, v.
    Where keys are the values: (num_heads + num_kv_heads) head_dim; v means nothing."""
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    return heads[:, :num_heads], heads[:, num_heads:][:, :num_kv_heads], heads[:, -num_kv_heads:]


def gather_kv(
    pool: Tensor, layer: int, block_table: Tensor, length: int, slots: bool = False
) -> tuple[Tensor, Tensor]:
    """One sequence's keys and values, each [length, num_kv_heads, head_dim]. ``slots``: see
    ``AttentionInputs``."""
    if slots:
        at = block_table[:length].long()
        tokens = pool[at // pool.shape[4], layer, :, :, at % pool.shape[4]]
        return tokens[:, 0], tokens[:, -1]
    num_blocks = -(-length // pool.shape[4])
    blocks = pool[block_table[:num_blocks].long(), layer].transpose(2, 3)
    keys, values = blocks[:, 0], blocks[:, -1]  # [num_blocks, block_size, num_kv_heads, head_dim]
    return keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]


def attention(q: Tensor, keys: Tensor, values: Tensor, inputs: AttentionInputs) -> Tensor:
    """softmax(scale q k^T) v of one sequence, causal; the queries are its last tokens. q [num_queries,
    num_heads, head_dim]."""
    num_queries, num_heads = q.shape[:2]
    length, num_kv_heads = keys.shape[:2]
    query_positions = torch.arange(length - num_queries, length, device=q.device).unsqueeze(1)
    distance = query_positions - torch.arange(length, device=q.device)
    visible = distance >= 0
    if inputs.sliding_window is not None:
        visible = visible & (distance < inputs.sliding_window)
    repeated = num_heads // num_kv_heads
    k = keys.transpose(0, 1).repeat_interleave(repeated, dim=0)
    v = values.transpose(0, 1).repeat_interleave(repeated, dim=0)
    if inputs.softcap or inputs.sinks is not None:
        scores = q.transpose(0, 1).float() @ k.transpose(1, 2).float() * inputs.scale
        if inputs.softcap:
            scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if inputs.sinks is not None:
            scores = torch.cat((scores, inputs.sinks[:, None, None].expand(-1, num_queries, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        return (weights @ v.float()).transpose(0, 1).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=inputs.scale
    )
    return out[0].transpose(0, 1)


def quantize_e4m3(x: Tensor, scales: Tensor) -> Tensor:
    """x [..., num_heads, head_dim] / scales [num_heads], to float8_e4m3fn; what is beyond its range becomes
    its largest value."""
    return (x.float() / scales[:, None]).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)


def quantize_int8(x: Tensor) -> Tensor:
    """x [..., head_dim] -> int8 [..., head_dim + INT8_SCALE_BYTES]: codes, then the float32 scale."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    codes = (x.float() / scale.where(scale > 0, 1.0)).round().to(torch.int8)
    return torch.cat((codes, scale.view(torch.int8)), dim=-1)


def dequantize_int8(rows: Tensor) -> Tensor:
    """The inverse of ``quantize_int8``, in float32."""
    codes, scale = rows[..., :-INT8_SCALE_BYTES], rows[..., -INT8_SCALE_BYTES:]
    return codes.float() * scale.contiguous().view(torch.float32)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def _norm_of_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``RopeInputs.q_norm``."""
    wide = x.float()
    if weight.dim() == 2:
        wide = wide - wide.mean(-1, keepdim=True)
    return _rms_norm(wide, weight, eps).to(x.dtype)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim]; angles: cosines, then sines, float32 [num_tokens, 1, head_dim]."""
    cos, sin = angles.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
