"""A layer of the decoder with attention over keys and values (``decoder.py``, which names the sizes)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.interface import AttentionInputs, DenseMlp, LayerParts, Linear, RopeInputs
from .adapters import AdaptedLinear, base_of
from .config import ModelConfig
from .latent_chunks import ExpandedQueries, LatentChunks
from .layer_mlp import LayerMlp, ResidualNorm
from .layers import LayerLoader
from .rope import rows_of_gates, rows_of_qkv, rows_side_by_side
from .sparse_attention import SparseLatentAttention, SparseStep, attention_of

VECTOR = 64
"""A multiple of torch's vectors on CPUs: behind the last whole one, a sigmoid may have other bits."""


class DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        index: int,
        load: LayerLoader,
        cos_sin: Tensor,
        query_factors: Tensor | None = None,
        index_cos_sin: Tensor | None = None,
    ) -> None:
        """``query_factors``: see ``rope.query_factors``. ``index_cos_sin``: of ``Indexer``."""
        t, name = config.tensors, config.tensors.layer_name(index)
        rank, heads = load.rank, config.heads_of(index)
        sizes = heads.head_dim, config.num_heads, heads.num_kv_heads
        rows = rows_of_qkv(config.ropes[index], *sizes)

        def norm(of: str) -> Tensor | None:
            return load.norm(f"{name}.{of}", float(config.unit_norms)) if of else None

        def norm_of_heads(of: str, own: slice) -> Tensor | None:
            """In the order of the heads' numbers here."""
            weight = norm(of) if config.qk_norm else None
            if weight is not None and rows is not None:
                order = rows[: weight.numel()].to(weight.device)  # q's come first; k's are in the same order
                weight = weight.flatten()[order].view_as(weight)
            return weight[own].contiguous() if weight is not None and config.qk_norm == "each" else weight

        self._index, self._rank = config.cache_layer(index), rank
        self._kernels = load.kernels
        self._eps, self._cos_sin = config.residual_eps, cos_sin
        self._qk_norm, self._inner_eps = config.qk_norm, config.rms_norm_eps
        self._parallel = config.parallel
        self._sliding_window = config.sliding_windows[index]
        self._sinks = load.sinks(f"{name}.{t.sinks}") if t.sinks else None
        self._input_norm = ResidualNorm(load.kernels, norm(t.input_norm), self._eps)
        self._attention_out_norm = norm(t.attention_out_norm)
        self._qkv: Linear
        self._o: Linear
        self._gate: Linear | None = None
        self._sparse: SparseLatentAttention | None = None
        self._spreads = config.latent is not None and load.spread is not None
        if config.latent is not None:
            latent = attention_of(config, index, load, index_cos_sin)
            self._sparse = latent if isinstance(latent, SparseLatentAttention) else None
            self._latent, self._qkv, self._o = latent, latent.queries_and_key, latent.output
        else:
            gated = config.output_gate
            own = rows_of_qkv(config.ropes[index], *sizes, rank, heads.keys_are_values, gated)
            adapted = rows_side_by_side(*sizes) if config.side_by_side else None
            names = [f"{name}.{of}" for of in (t.q, t.k, "" if heads.keys_are_values else t.v) if of]
            self._qkv = load.column(names, config.qkv_bias, own, adapted)
            if gated:
                gates = rows_of_gates(heads.head_dim, config.num_heads, rank)
                self._gate = load.column([f"{name}.{t.q}"], config.qkv_bias, gates)
            self._o = load.row(f"{name}.{t.o}", config.o_bias, config.layer_norms)
        own_kv_heads = rank.kv_heads(heads.num_kv_heads)
        self._q_norm = norm_of_heads(t.q_norm, rank.part(config.num_heads))
        self._k_norm = norm_of_heads(t.k_norm, own_kv_heads)
        self._heads = own_kv_heads.stop - own_kv_heads.start, heads.head_dim
        self._views_pool = heads == config.full_heads
        self._value_norm: Tensor | None = None
        if config.values_normed:
            self._value_norm = torch.ones(heads.head_dim, dtype=load.dtype, device=load.device)
        self._scalar = load.whole_tensor(f"{name}.{t.scalar}") if t.scalar else None
        self._query_factors = None if query_factors is None else query_factors.to(load.dtype)
        self._mlp = LayerMlp(config, index, load)
        self._query_weight: Tensor | None = None
        if config.norm_after_rope and self._q_norm is not None and self._k_norm is not None:
            # rope keeps a head's length: both weights go to the queries, behind it
            self._query_weight = self._q_norm.float() * self._k_norm.float()
            self._q_norm = self._k_norm = torch.ones_like(self._q_norm)

    @property
    def stands_alone(self) -> bool:
        """It does what kernels of several layers do not: also norm outputs with another eps than that of the
        residual, which is divided."""
        own = self._query_factors, self._query_weight, self._value_norm, self._scalar, self._gate
        out_norms = self._attention_out_norm is not None or self._mlp.out_norm is not None
        return any(part is not None for part in (*own, self._mlp.beside)) or (
            out_norms and self._eps != self._inner_eps
        )

    @property
    def parts(self) -> LayerParts:
        """Its weights, for kernels that run several layers in one call."""
        mlp, linears = self._mlp.mlp, [self._qkv, self._o]
        if isinstance(mlp, DenseMlp):
            linears += [mlp.gate_up, mlp.down]
            mlp = replace(mlp, gate_up=base_of(mlp.gate_up), down=base_of(mlp.down))
        return LayerParts(
            self._input_norm.weight, base_of(self._qkv), self._q_norm, self._k_norm, self._qk_norm == "all",
            self._cos_sin, base_of(self._o), self._attention_out_norm, self._mlp.norm.weight, mlp,
            self._mlp.out_norm, self._sliding_window, self._sinks,
            [linear.updates for linear in linears if isinstance(linear, AdaptedLinear)],
        )  # fmt: skip

    def project(
        self, hidden: Tensor | None, residual: Tensor, pool: Tensor, rope: RopeInputs,
        sparse: SparseStep | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes the tokens' keys and values to ``pool``; returns their queries [T, H, D].

        ``hidden`` [T, E] is the last layer's output, not yet added to ``residual`` [T, E], which takes it in.
        """
        if self._sparse is not None:
            x, rope = self._input_norm(hidden, residual), replace(rope, cos_sin=self._cos_sin)
            return self._sparse.project(x, pool, self._index, rope, sparse)
        qkv = self._input_norm.into(self._qkv, hidden, residual)  # [T, (H + 2 KVH) D]
        num_kv_heads, head_dim = self._heads
        cos_sin = rope.cos_sin if rope.of_step else self._cos_sin
        rope = replace(rope, cos_sin=cos_sin, num_kv_heads=num_kv_heads, head_dim=head_dim)
        if self._value_norm is not None:
            values = qkv[:, -num_kv_heads * head_dim :]
            rows = values.reshape(-1, head_dim).contiguous()
            values.copy_(self._kernels.rms_norm(rows, self._value_norm, self._inner_eps).view_as(values))
        if self._qk_norm != "all":
            rope = replace(rope, q_norm=self._q_norm, k_norm=self._k_norm)
        elif self._q_norm is not None and self._k_norm is not None:
            first = rope.num_heads * rope.head_dim
            last = first + rope.num_kv_heads * rope.head_dim
            for part, weight in ((qkv[:, :first], self._q_norm), (qkv[:, first:last], self._k_norm)):
                part.copy_(self._norm_of_all_heads(part.clone(), weight))
        q = self._kernels.rope_and_store(qkv, self._own_heads(pool), self._index, rope)
        if self._query_weight is not None:
            q = (q * self._query_weight).to(q.dtype)
        return self._scaled(q, rope.positions)

    def _own_heads(self, pool: Tensor) -> Tensor:
        """``pool``, or a view of it: see ``full_heads.py``."""
        if not self._views_pool:
            return pool
        blocks, layers, planes, places, block_size, row = pool.shape
        num_heads, head_dim = self._heads
        strides = (*pool.stride()[:3], places // num_heads * block_size * row, head_dim, 1)
        return pool.as_strided((blocks, layers, planes, num_heads, block_size, head_dim), strides)

    def _scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        if self._query_factors is None:
            return q
        known = positions.clamp(0, len(self._query_factors) - 1)  # a graph's rows of padding hold any number
        return q * self._query_factors[known][:, None, None]

    def _norm_of_all_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x``: of this rank's heads. The others may still read it when this returns."""
        rank, width = self._rank, x.shape[1]
        if rank.size == 1:
            return self._kernels.rms_norm(x, weight, self._inner_eps)
        parts = rank.joined(x, rank.size * width).view(len(x), rank.size, width)
        copies = rank.size * width // len(weight)  # ranks with the same heads
        normed = self._kernels.rms_norm(parts[:, ::copies].flatten(1), weight, self._inner_eps)
        return normed.view(len(x), -1, width)[:, rank.number // copies]

    def project_chunks(
        self, hidden: Tensor | None, residual: Tensor, pool: Tensor, rope: RopeInputs, chunks: LatentChunks
    ) -> ExpandedQueries:
        """As ``project``, in a step with chunks that are expanded."""
        x = self._input_norm(hidden, residual)
        q = self._latent.project_chunks(x, pool, self._index, replace(rope, cos_sin=self._cos_sin), chunks)
        own, others = (rope.positions[rows] for rows in (chunks.rows, chunks.other_rows))
        return replace(q, whole=self._scaled(q.whole, own), absorbed=self._scaled(q.absorbed, others))

    def attend_and_mix(
        self, q: Tensor | ExpandedQueries, residual: Tensor, pool: Tensor, attention: AttentionInputs,
        sparse: SparseStep | None = None,
    ) -> Tensor:  # fmt: skip
        """The rest of the layer for the queries at hand, whose residual rows these are; returns its output,
        not yet added to them."""
        k = self._kernels
        if self._sliding_window is not None or self._sinks is not None:
            attention = replace(attention, sliding_window=self._sliding_window, sinks=self._sinks)
        if isinstance(q, ExpandedQueries):
            hidden = self._latent.attend_chunks(q, pool, self._index)
        elif self._sparse is not None:
            hidden = self._o(self._sparse.attend(q, pool, self._index, attention, sparse))
        elif self._spreads:
            hidden = self._latent.attend_own_blocks(q, pool, self._index, attention)
        else:
            sums = self._gated(k.paged_attention(q, self._own_heads(pool), self._index, attention), residual)
            hidden = self._o(sums)
        if self._parallel:
            return hidden.add_(self._mlp.of(self._input_norm, None, residual))
        if self._attention_out_norm is not None:
            hidden = k.rms_norm(hidden, self._attention_out_norm, self._inner_eps)
        hidden = self._mlp(hidden, residual)
        if self._scalar is None:
            return hidden
        residual.add_(hidden).mul_(self._scalar)
        return hidden.zero_()

    def _gated(self, sums: Tensor, residual: Tensor) -> Tensor:
        """The heads' sums [n, H D] times their gates. These are made of the same as the queries: the layer's
        output is not yet added to ``residual``."""
        if self._gate is None:
            return sums
        gate = self._input_norm.into(self._gate, None, residual)
        if odd := -gate.shape[1] % VECTOR:
            return sums.mul_(pad(gate, (0, odd)).sigmoid_()[:, : gate.shape[1]])
        return sums.mul_(gate.sigmoid_())
