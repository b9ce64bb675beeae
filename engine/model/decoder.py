"""The decoder that all families share (``families.py``): they differ in ``ModelConfig`` only.

    h = embed(tokens)
    each layer:  h += o(attention(rope(qkv(norm(h)))));  h += down(act(gate(n)) * up(n)), n = norm(h),
                 or a weighted sum of several such, for each token of its own (a mixture of experts)
    logits = head(norm(h))

In some families most layers are recurrent (``recurrent_layer.py``). The KV cache has no layers for these:
their states lie in blocks of their own, in the bytes of the next layer, or of the last. So layers are counted
as the cache counts them: each with the recurrent ones before it, and the last with those behind it, too.

Some families norm what a layer adds to h, in place of its input or as well (``TensorNames``). In parallel
layers attention and MLP share norm(h). LayerNorm, which subtracts the mean, is RMSNorm of an h without mean:
what is added to h has its mean taken out at load (Ashkboos et al., SliceGPT, 2024).

T: num_tokens of the step, E: hidden_size, H: num_heads, KVH: num_kv_heads, D: head_dim, F: intermediate_size,
V: vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.interface import AttentionInputs, FusedLayers, Linear, RopeInputs
from .adapters import StepSlots
from .block_spread import BlockSpread
from .config import ModelConfig
from .decoder_layer import DecoderLayer
from .embedding import Embedding
from .latent_chunks import FEWEST_TOKENS, ExpandedQueries, latent_chunks
from .layers import LayerLoader
from .prediction_layer import PredictionLayer, check_layer
from .ranks import of_rank
from .recurrent_config import final_layers
from .recurrent_layer import RecurrentLayer, run_recurrent
from .rope import cos_sin_table, query_factors, rows_of_axes
from .sparse_attention import sparse_step
from .step_inputs import AttentionMetadata, StepImages, StepInputs
from .tensors import expected_tensors, ignored_tensors


class DecoderModel:
    def __init__(
        self, config: ModelConfig, load: LayerLoader, max_model_len: int, fp8_cache: bool = False
    ) -> None:
        check_layer(config, load.checkpoint)
        load.checkpoint.check(expected_tensors(config), ignored_tensors(config))
        self._config, self.rank = of_rank(config, load.rank), load.rank
        self._kernels = load.kernels
        self._slots = load.adapters.step if load.adapters is not None else StepSlots()
        self.embed = Embedding(config, load)
        self._tables = {
            rope: cos_sin_table(rope, head_dim, max_model_len).to(load.device)
            for rope, head_dim in {
                rope: config.heads_of(i).head_dim for i, rope in enumerate(config.ropes)
            }.items()
        }
        factors = {
            rope: of.to(load.device)
            for rope in self._tables
            if (of := query_factors(rope, max_model_len)) is not None
        }
        self._eps = config.residual_eps
        self._expands = self._config.latent if load.expands_latent else None
        self._spread = load.spread

        index_table = None
        if config.index is not None:
            index_table = cos_sin_table(config.ropes[0], config.index.head_dim, max_model_len).to(load.device)

        def layer(i: int) -> DecoderLayer | RecurrentLayer:
            if config.recurrent is not None and config.recurrent.layers[i]:
                return RecurrentLayer(config, i, load)
            rope = config.ropes[i]
            return DecoderLayer(config, i, load, self._tables[rope], factors.get(rope), index_table)

        layers = load.each(layer, config.num_layers)
        self._layers = [each for each in layers if isinstance(each, DecoderLayer)]
        self._recurrent: list[list[RecurrentLayer]] = [[]]  # those before each of these, and behind the last
        for each in layers:
            if isinstance(each, RecurrentLayer):
                self._recurrent[-1].append(each)
            else:
                self._recurrent.append([])
        in_order = list(range(1, len(self._layers) + 1))
        self._final = in_order if config.recurrent is None else final_layers(config.recurrent)
        parts = [layer.parts for layer in self._layers]
        alone = any(layer.stands_alone for layer in self._layers) or len(layers) > len(self._layers)
        self._fused = (
            None if config.parallel or config.latent or alone else load.kernels.fuse_layers(parts, self._eps)
        )
        self._norm = load.norm(config.tensors.norm, float(config.unit_norms))
        embed, head = config.tensors.embed, config.tensors.head
        if config.tie_word_embeddings and not load.differ(embed, head):
            self._head = load.vocabulary_head(embed, self.embed.table)
        else:
            self._head = load.vocabulary_head(head)
        self.prediction: PredictionLayer | None = None  # packed last: files of packed weights fit without it
        if config.predicts:
            behind = layer(config.num_layers)
            assert isinstance(behind, DecoderLayer), "no family with recurrent layers has names for it"
            self.prediction = PredictionLayer(config, load, behind, self._slots)
        self._kv_scales = load.kv_scales(config) if fp8_cache else None

    def forward(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        pool: Tensor,
        rows: Tensor | None,
        on_layer: Callable[[int], None] | None = None,
        images: StepImages | None = None,
    ) -> Tensor:
        """Run the batch, write its keys and values to ``pool``, and return the final hidden states [n, E] of
        ``rows``.

        ``rows`` int64 [n]: token rows; None: all, in order. ``on_layer`` gets the number of layers whose keys
        and values, and states, are written (on a GPU: once the stream has run), from 0 on.

        If every row is wanted (a decode step), kernels may run all layers in one call; ``on_layer`` then gets
        0 and the last two counts only.

        For other rows the last layer computes keys and values only: that saves 1 / num_layers of a prefill.
        """
        residual = self.embed(token_ids)
        if images is not None:
            residual.index_copy_(0, images.rows, images.features)
        elif rows is None and self._fused is not None and len(token_ids) < self._fused.rows:
            return self._forward_fused(self._fused, residual, metadata, pool, on_layer)
        if on_layer is not None:
            on_layer(0)
        inputs, last = self.inputs(metadata), len(self._layers) - 1
        if self._spread is not None and metadata.on_host is not None:
            inputs = self._spread_inputs(self._spread, inputs, metadata, *metadata.on_host)
        elif self._expands is not None and inputs.sparse is None and len(token_ids) >= FEWEST_TOKENS:
            inputs = inputs._replace(chunks=latent_chunks(self._expands, inputs.attention, pool.shape[4]))
        if rows is None and inputs.chunks is not None and (self.prediction or self._spread):
            hidden = self.run_layers(0, last + 1, None, residual, inputs, pool, on_layer, images)
            assert hidden is not None
            return self._kernels.add_rms_norm(hidden, residual, self._norm, self._eps)
        hidden = self.run_layers(0, last, None, residual, inputs, pool, on_layer, images)
        q = self.project_last(hidden, residual, inputs, pool)
        if on_layer is not None:
            on_layer(last + 1)
        if rows is not None:
            q, residual = q[rows], residual[rows]
            inputs = self.inputs_of_rows(inputs, metadata.of_rows(rows), rows)
        return self.finish(q, residual, inputs, pool)

    @property
    def num_layers(self) -> int:
        """Number of layers of the KV cache, without that of ``prediction``."""
        return len(self._layers)

    def inputs(self, metadata: AttentionMetadata) -> StepInputs:
        c, m, scales = self._config, metadata, self._kv_scales
        positions, table = m.positions if m.rope is None else m.rope, self._tables[c.ropes[0]]
        of_step = positions.dim() > 1
        if of_step:
            table = rows_of_axes(table, c.ropes[0], positions)
            positions = torch.arange(len(table), dtype=torch.int32, device=table.device)
        slots, spread = m.slot_mapping, self._spread
        attention = AttentionInputs(
            m.query_start_loc, m.seq_lens, m.block_tables, c.scales.attention,
            softcap=c.attention_softcap, kv_scales=scales, max_query_len=m.max_query_len,
        )  # fmt: skip
        if spread is not None:
            slots = spread.own_slots(slots)
            if len(m.seq_lens) == len(m.positions):  # else see ``_spread_inputs``
                attention = spread.own_inputs(attention)
        rope = RopeInputs(
            positions, slots, table,
            c.num_heads, c.num_kv_heads, c.head_dim,
            norm_eps=c.rms_norm_eps, kv_scales=scales, of_step=of_step,
        )  # fmt: skip
        sparse = None if c.index is None else sparse_step(attention, c.index.chosen)
        return StepInputs(rope, attention, m.adapters, m.states, sparse=sparse)

    def inputs_of_rows(self, inputs: StepInputs, metadata: AttentionMetadata, rows: Tensor) -> StepInputs:
        """For queries of the token rows ``rows`` alone, behind a layer's ``project`` with ``inputs``.
        ``metadata``: of these rows."""
        own = self.inputs(metadata)
        return own._replace(sparse=None if inputs.sparse is None else inputs.sparse.of_rows(rows, own.sparse))

    def _spread_inputs(
        self, spread: BlockSpread, inputs: StepInputs, metadata: AttentionMetadata, *on_host: Tensor
    ) -> StepInputs:
        """``inputs`` of ``metadata``, where sequences have several tokens: those that are no chunk are a row
        each, over this rank's blocks."""
        assert self._config.latent is not None
        device, expands = metadata.positions.device, self._expands is not None
        whole = inputs.attention.of(*on_host)
        chunks = latent_chunks(self._config.latent, whole, spread.block_size, spread, expands)
        if chunks is None:
            rows = torch.arange(len(metadata.positions), device=device)
            return inputs._replace(attention=self.inputs(metadata.of_rows(rows)).attention)
        chunks = chunks.sent_to(device)
        others = self.inputs(metadata.of_rows(chunks.other_rows)).attention
        return inputs._replace(chunks=replace(chunks, others=others))

    def run_layers(
        self,
        first: int,
        last: int,
        hidden: Tensor | None,
        residual: Tensor,
        inputs: StepInputs,
        pool: Tensor,
        on_layer: Callable[[int], None] | None = None,
        images: StepImages | None = None,
    ) -> Tensor | None:
        """Layers [first, last). ``hidden`` [T, E], of the layer before, is not yet added to ``residual``, nor
        is the result; None: no layer has run."""
        self._slots.now = inputs.adapters
        for index, layer in enumerate(self._layers[first:last], start=first + 1):
            hidden = run_recurrent(self._recurrent[index - 1], hidden, residual, pool, inputs.states)
            q: Tensor | ExpandedQueries
            if inputs.chunks is None:
                q = layer.project(hidden, residual, pool, inputs.rope, inputs.sparse)
            else:
                q = layer.project_chunks(hidden, residual, pool, inputs.rope, inputs.chunks)
            if on_layer is not None:
                on_layer(self._final[index - 1])
            hidden = layer.attend_and_mix(q, residual, pool, inputs.attention, inputs.sparse)
            if images is not None and index <= len(images.deep):
                residual.index_add_(0, images.rows, images.deep[index - 1])
        return hidden

    def project_last(
        self, hidden: Tensor | None, residual: Tensor, inputs: StepInputs, pool: Tensor
    ) -> Tensor:
        """Write the last layer's keys and values, add ``hidden`` to ``residual`` and return the queries. With
        recurrent layers behind it: run these, too, and return what the last of them has mixed."""
        self._slots.now = inputs.adapters
        *before, behind = self._recurrent
        hidden = run_recurrent(before[-1], hidden, residual, pool, inputs.states)
        q = self._layers[-1].project(hidden, residual, pool, inputs.rope, inputs.sparse)
        if not behind:
            return q
        hidden = self._layers[-1].attend_and_mix(q, residual, pool, inputs.attention)
        hidden = run_recurrent(behind[:-1], hidden, residual, pool, inputs.states)
        assert inputs.states is not None
        return behind[-1].mix(hidden, residual, pool, inputs.states)

    def finish(self, q: Tensor, residual: Tensor, inputs: StepInputs, pool: Tensor) -> Tensor:
        """The final hidden states [n, E] of rows of ``project_last``, whose residual rows and inputs these
        are."""
        if len(q) == 0:
            return residual
        self._slots.now = inputs.adapters
        if behind := self._recurrent[-1]:
            hidden = behind[-1].finish(q, residual)
        else:
            hidden = self._layers[-1].attend_and_mix(q, residual, pool, inputs.attention, inputs.sparse)
        return self._kernels.add_rms_norm(hidden, residual, self._norm, self._eps)

    def _forward_fused(
        self,
        fused: FusedLayers,
        residual: Tensor,
        metadata: AttentionMetadata,
        pool: Tensor,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        rope, attention, adapters = self.inputs(metadata)[:3]
        hidden = torch.empty_like(residual)
        last = len(self._layers) - 1
        report = on_layer or (lambda _: None)
        for first, end in [(0, last), (last, last + 1)] if on_layer is not None and last else [(0, last + 1)]:
            report(first)
            fused(first, end, hidden, residual, pool, rope, attention, adapters)
        report(last + 1)
        return self._kernels.add_rms_norm(hidden, residual, self._norm, self._eps)

    def logits(self, hidden: Tensor, out: Tensor | None = None, head: Linear | None = None) -> Tensor:
        """Final hidden states [n, E] -> float32 [n, V], in ``out`` if given. ``head``: None: the model's
        own."""
        logits = self.rank.joined((head or self._head)(hidden), self._config.vocab_size)
        logits = logits.float() if out is None else out.copy_(logits)
        factor, softcap = self._config.scales.logits, self._config.logits_softcap
        if softcap:
            return logits.mul_(factor / softcap).tanh_().mul_(softcap)
        return logits if factor == 1.0 else logits.mul_(factor)
