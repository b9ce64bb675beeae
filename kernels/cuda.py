"""The kernels on NVIDIA GPUs: Triton's, from gpu/, and cuBLAS for the matrix products. Nothing here waits for
the device.

Exact: products by gpu/exact_linear.py, and both attention kernels in one tile shape with the same folds, so
that a token's row has the same bits in any batch and chunk, prefilled or decoded. The other kernels are like
that anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .gpu.attention_tiles import TileShape
from .gpu.decode_attention import EXACT_PROGRAMS_PER_SM, decode_attention, decode_tile, programs_per_sm
from .gpu.decode_plan import DecodePlan, plan_decode
from .gpu.delta_net import delta_net
from .gpu.elementwise import embedding, gate_mul
from .gpu.exact_linear import ExactLinear
from .gpu.fp8_linear import MULTIPLE, Fp8Linear
from .gpu.latent_attention import latent_attention
from .gpu.low_rank import GpuLowRank
from .gpu.mixture import GpuMixture
from .gpu.norm import add_rms_norm, rms_norm
from .gpu.prefill_attention import PrefillPlan, exact_tile, plan_prefill, prefill_attention, prefill_tile
from .gpu.provided_attention import ProvidedAttention
from .gpu.quantised_linear import QuantisedLinear
from .gpu.rope_store import rope_and_store
from .gpu.short_conv import short_conv
from .interface import AttentionInputs, LayerParts, Linear, joined
from .mixture_weights import ExpertWeights, MixtureWeights
from .quantised import QuantisedWeight, Scheme, Weight, joined_weight, parts_of, quantise
from .sparse_index import index_slots
from .torch_linear import SplitLinear, TorchLinear

Plans = tuple[DecodePlan | None, PrefillPlan | None]


class CudaKernels:
    """See ``interface.Kernels`` for the contracts."""

    key_group = 1

    def __init__(
        self,
        num_sms: int,
        exact: bool = False,
        scheme: Scheme | None = None,
        prefill_shape: TileShape | None = None,
        provided: ProvidedAttention | None = None,
    ) -> None:
        """``num_sms``: multiprocessors of the GPU; ``scheme``: linear layers are quantised by it (float8 ones
        round their inputs too where their shape allows it, if not exact); ``prefill_shape``: another than the
        one that suits the GPU (small ones, for the interpreter); ``provided``: attention of the steps that it
        serves."""
        self._num_sms = num_sms
        self._exact = exact
        self._scheme = scheme
        self._prefill_shape = prefill_shape
        assert not (exact and provided), "the exact attention is Triton's"
        self._provided = provided

    def linear(self, weight: Weight | Sequence[Weight], bias: Tensor | None, as_is: bool = False) -> Linear:
        given = parts_of(weight)
        parts = [part for part in given if isinstance(part, Tensor)]
        if len(parts) < len(given):
            return self._quantised(given, bias)
        if as_is:
            return self._wide(joined(parts), bias)
        whole = sum(map(len, parts)) % MULTIPLE == parts[0].shape[1] % MULTIPLE == 0
        if self._scheme == "fp8" and whole and not self._exact:
            return Fp8Linear(parts, bias)
        if self._scheme is not None:
            return self._quantised([quantise(part, self._scheme) for part in parts], bias)
        return self._wide(joined(parts), bias)

    def mixture(self, weights: MixtureWeights) -> GpuMixture:
        """Experts are quantised at load as linears are; their inputs are not rounded."""
        scheme, shared, expert_of = self._scheme, None, weights.expert
        if weights.shape.shared_size:
            expert = weights.expert(weights.shape.num_experts)
            shared = self.linear(expert.gate_up, None), self.linear(expert.down, None)

        def quantised(i: int) -> ExpertWeights:
            of = expert_of(i)
            assert isinstance(of.down, Tensor)
            assert scheme is not None
            return ExpertWeights(quantise(joined(of.gate_up), scheme), quantise(of.down, scheme))

        if scheme is not None:
            weights = replace(weights, expert=quantised)
        return GpuMixture(weights, self._wide(weights.router, weights.router_bias), shared)

    def head(self, weight: Weight) -> Linear:
        if isinstance(weight, Tensor) and self._scheme in ("int8", "int4"):
            weight = quantise(weight, "int8")
        return self._quantised([weight], None) if isinstance(weight, QuantisedWeight) else self._wide(weight)

    def low_rank(
        self, in_features: int, out_features: int, max_rank: int, num_slots: int, dtype: torch.dtype,
        device: torch.device,
    ) -> GpuLowRank:  # fmt: skip
        return GpuLowRank(in_features, out_features, max_rank, num_slots, dtype, device)

    def _wide(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return ExactLinear(weight, bias) if self._exact else TorchLinear(weight, bias)

    def _quantised(self, parts: Sequence[Weight], bias: Tensor | None) -> Linear:
        """Weights of which some are quantised."""
        alike = [part for part in parts if isinstance(part, QuantisedWeight)]
        whole = joined_weight(alike) if len(alike) == len(parts) else None
        if whole is not None:
            return QuantisedLinear(whole, bias, self._num_sms, self._exact)
        linears = [
            self._quantised([part], None) if isinstance(part, QuantisedWeight) else self._wide(part)
            for part in parts
        ]
        return SplitLinear(linears, bias)

    embedding, gate_mul = staticmethod(embedding), staticmethod(gate_mul)
    rms_norm, add_rms_norm = staticmethod(rms_norm), staticmethod(add_rms_norm)
    rope_and_store = staticmethod(rope_and_store)
    delta_net, short_conv = staticmethod(delta_net), staticmethod(short_conv)
    index_slots = staticmethod(index_slots)

    def paged_attention(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        if pool.shape[2] == 1:
            return latent_attention(q, pool, layer, inputs, self._num_sms, self._exact)
        plain = not inputs.softcap and inputs.sinks is None
        provided = self._provided if plain else None  # theirs is not asked for these
        if provided is not None and provided.serves(q, pool, inputs):
            return provided(q, pool, layer, inputs)
        num_tokens, num_heads, head_dim = q.shape
        window = inputs.sliding_window
        if window not in inputs.plans:
            inputs.plans[window] = self._plan(q, pool, inputs)
        decode, prefill = inputs.plans[window]
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
        if decode is not None:
            group = num_heads // pool.shape[3]
            if self._exact:
                tile, at_once = self._prefill_tile(q, pool), EXACT_PROGRAMS_PER_SM
            else:
                tile = decode_tile(head_dim, group, q.itemsize, fp8=pool.dtype.itemsize == 1)
                at_once = programs_per_sm(head_dim, group, pool.shape[4])
            decode_attention(out, q, pool, layer, inputs, decode, self._num_sms * at_once, tile)
        if prefill is not None:
            prefill_attention(out, q, pool, layer, inputs, prefill, split_folds=self._exact)
        return out

    def partial_attention(
        self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return latent_attention(q, pool, layer, inputs, self._num_sms, self._exact, lse), lse

    def use_this_thread(self) -> None:
        """No thread has settings of its own."""

    def fuse_layers(self, layers: Sequence[LayerParts], eps: float) -> None:
        """One call after the other it is."""

    def _plan(self, q: Tensor, pool: Tensor, inputs: AttentionInputs) -> Plans:
        """Sequences with one query are decoded, the others prefilled. Which these are, only the device knows,
        but not always."""
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, block_size = pool.shape[3:5]
        all_single, none_single = len(inputs.seq_lens) == num_tokens, len(inputs.seq_lens) == 1 < num_tokens
        sizes = num_heads, num_kv_heads, head_dim, block_size
        decode = None if none_single else plan_decode(inputs, *sizes, one_group=self._exact)
        if all_single:
            return decode, None
        tile = self._prefill_tile(q, pool)
        return decode, plan_prefill(inputs, num_tokens, num_heads // num_kv_heads, tile, singles=False)

    def _prefill_tile(self, q: Tensor, pool: Tensor) -> TileShape:
        if self._prefill_shape is not None:
            return self._prefill_shape
        tile = exact_tile if self._exact else prefill_tile
        return tile(q.shape[2], q.itemsize, fp8=pool.dtype.itemsize == 1)
