"""The kernels on NVIDIA GPUs: Triton's, from gpu/, and cuBLAS for the matrix products. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .gpu.attention_tiles import TileShape
from .gpu.decode_attention import DecodePlan, decode_attention, decode_tile, plan_decode, programs_per_sm
from .gpu.elementwise import embedding, silu_mul
from .gpu.gumbel_argmax import gumbel_argmax
from .gpu.norm import add_rms_norm, rms_norm
from .gpu.prefill_attention import PrefillPlan, plan_prefill, prefill_attention, prefill_tile
from .gpu.rope_store import rope_and_store
from .interface import AttentionInputs, Linear, RopeInputs
from .reference import TorchLinear

Plans = tuple[DecodePlan | None, PrefillPlan | None]


class CudaKernels:
    """See ``interface.Kernels`` for the contracts."""

    def __init__(self, num_sms: int, prefill_shape: TileShape | None = None) -> None:
        """``num_sms``: multiprocessors of the GPU; ``prefill_shape``: another than the one that suits it (small ones, for the
        interpreter)."""
        self._num_sms = num_sms
        self._prefill_shape = prefill_shape

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return TorchLinear(weight, bias)

    def embedding(self, table: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return embedding(table, token_ids, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def rope_and_store(self, qkv: Tensor, pool: Tensor, layer: int, rope: RopeInputs) -> Tensor:
        return rope_and_store(qkv, pool, layer, rope)

    def paged_attention(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        num_tokens, num_heads, head_dim = q.shape
        window = inputs.sliding_window
        if window not in inputs.plans:
            inputs.plans[window] = self._plan(q, pool, inputs)
        decode, prefill = inputs.plans[window]
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
        if decode is not None:
            group = num_heads // pool.shape[4]
            programs = self._num_sms * programs_per_sm(head_dim, group, pool.shape[3], pool.dtype)
            decode_attention(out, q, pool, layer, inputs, decode, programs, decode_tile(head_dim, group))
        if prefill is not None:
            prefill_attention(out, q, pool, layer, inputs, prefill, split_folds=False)
        return out

    def gumbel_argmax(self, logits: Tensor, keys: Tensor) -> Tensor:
        return gumbel_argmax(logits, keys)

    def _plan(self, q: Tensor, pool: Tensor, inputs: AttentionInputs) -> Plans:
        """Sequences with one query are decoded, the others prefilled. Which these are, only the device knows, but not always."""
        num_tokens, num_heads, head_dim = q.shape
        block_size, num_kv_heads = pool.shape[3:5]
        all_single, none_single = len(inputs.seq_lens) == num_tokens, len(inputs.seq_lens) == 1 < num_tokens
        decode = None if none_single else plan_decode(inputs, num_heads, num_kv_heads, head_dim, block_size)
        if all_single:
            return decode, None
        tile = self._prefill_shape or prefill_tile(head_dim)
        return decode, plan_prefill(inputs, num_tokens, num_heads // num_kv_heads, tile, singles=False)
