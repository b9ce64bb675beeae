"""RMSNorm or LayerNorm by head (where a model has it), rotary embedding and the write to the KV cache, in one
pass over q, k and v.

    q, k: x = norm(x) * weight;  (a, b) = (x[:D/2], x[D/2:]);  (a cos - b sin, b cos + a sin)
    q -> in place;  k, v -> pool[slot // block_size, layer, {0, 1}, slot % block_size]
    (divided by their head's scale if it is float8)

Bytes: q, k and v of a token in and out: 4 (num_heads + 2 num_kv_heads) head_dim in 16 bits. About 10 FLOPs an
element. One program takes some heads of one token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..interface import RopeInputs
from .attention_tiles import layer_of

HEADS_AT_ONCE = 8


def rope_and_store(qkv: Tensor, pool: Tensor, layer: int, rope: RopeInputs) -> Tensor:
    """qkv [num_tokens, (num_heads + planes num_kv_heads) * head_dim] -> q [num_tokens, num_heads, head_dim],
    which is part of ``qkv``. A token whose slot is negative is padding: its key and value are not written."""
    kv, kv_scales = layer_of(pool, layer), None if rope.kv_scales is None else rope.kv_scales[layer]
    rows, total = len(qkv), rope.num_heads + kv.shape[1] * rope.num_kv_heads
    dims = triton.next_power_of_2(rope.head_dim // 2)
    at_once = max(1, min(HEADS_AT_ONCE, HEADS_AT_ONCE * 128 // dims))
    assert qkv.shape[1] == total * rope.head_dim
    assert qkv.is_contiguous()
    assert rope.q_norm is None or rope.q_norm.is_contiguous()
    _rope_and_store_kernel[(rows, triton.cdiv(total, at_once))](
        qkv, kv, rope.positions, rope.slot_mapping, rope.cos_sin, rope.q_norm, rope.k_norm, kv_scales,
        rope.norm_eps, *kv.stride()[:4],
        NUM_HEADS=rope.num_heads, NUM_KV_HEADS=rope.num_kv_heads, HEAD_DIM=rope.head_dim,
        PLANES=kv.shape[1], BLOCK_SIZE=kv.shape[3], HEADS=at_once, DIMS=dims, SCALED=kv_scales is not None,
        NORM=0 if rope.q_norm is None else rope.q_norm.dim(), num_warps=2,
    )  # fmt: skip
    return qkv.view(rows, total, rope.head_dim)[:, : rope.num_heads]


@triton.jit
def _rope_and_store_kernel(
    qkv, kv, positions, slot_mapping, cos_sin, q_norm, k_norm, kv_scales, norm_eps,
    stride_block, stride_value, stride_head, stride_token,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PLANES: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    is_dim = (dims < HALF)[None, :]
    real = (heads < NUM_HEADS + PLANES * NUM_KV_HEADS)[:, None] & is_dim
    at = (
        qkv
        + token * ((NUM_HEADS + PLANES * NUM_KV_HEADS) * HEAD_DIM)
        + heads[:, None] * HEAD_DIM
        + dims[None, :]
    )
    a = tl.load(at, mask=real, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    rotated_a = a
    rotated_b = b
    if NORM:
        if NORM == 2:  # each head has a weight of its own
            mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / HEAD_DIM)[:, None]
            a = tl.where(is_value | ~is_dim, a, a - mean)
            b = tl.where(is_value | ~is_dim, b, b - mean)
        scale = 1.0 / tl.sqrt_rn((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + norm_eps)[:, None]
        is_query = (heads < NUM_HEADS)[:, None]
        weight = tl.where(is_query, q_norm + dims[None, :], k_norm + dims[None, :])
        if NORM == 2:
            weight += tl.where(is_query, heads[:, None], heads[:, None] - NUM_HEADS) * HEAD_DIM
        normed = real & ~is_value
        weight_a = tl.load(weight, mask=normed, other=0.0).to(tl.float32)
        weight_b = tl.load(weight + HALF, mask=normed, other=0.0).to(tl.float32)
        rotated_a = (a * scale * weight_a).to(qkv.dtype.element_ty).to(tl.float32)
        rotated_b = (b * scale * weight_b).to(qkv.dtype.element_ty).to(tl.float32)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * HEAD_DIM
    cos = _row(angles, dims, HALF)
    sin = _row(angles + HALF, dims, HALF)
    out_a = tl.where(is_value, a, rotated_a * cos - rotated_b * sin)
    out_b = tl.where(is_value, b, rotated_b * cos + rotated_a * sin)

    query = (heads < NUM_HEADS)[:, None] & is_dim
    tl.store(at, out_a.to(qkv.dtype.element_ty), mask=query)
    tl.store(at + HALF, out_b.to(qkv.dtype.element_ty), mask=query)
    slot = tl.load(slot_mapping + token)
    cached = heads - NUM_HEADS  # key heads, then value heads
    stored = real & (cached >= 0)[:, None] & (slot >= 0)
    if SCALED:
        scale = tl.load(kv_scales + cached, mask=(cached >= 0) & (cached < 2 * NUM_KV_HEADS), other=1.0)[
            :, None
        ]
        out_a = tl.minimum(tl.maximum(out_a / scale, -448.0), 448.0)
        out_b = tl.minimum(tl.maximum(out_b / scale, -448.0), 448.0)
    slot = tl.maximum(slot, 0)
    where = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token
    head = (cached // NUM_KV_HEADS) * stride_value + (cached % NUM_KV_HEADS) * stride_head
    to = kv + where + head[:, None] + dims[None, :]
    tl.store(to, out_a.to(kv.dtype.element_ty), mask=stored)
    tl.store(to + HALF, out_b.to(kv.dtype.element_ty), mask=stored)


@triton.jit
def _row(pointer, dims, HALF: tl.constexpr):
    """float32 [1, DIMS]."""
    return tl.load(pointer + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
