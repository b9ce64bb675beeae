"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), absorbed: attention runs over the latent
vectors that the cache holds, as if all heads shared one key that is its value, too.

    score of head h = q_plain . (K[h] c) + q_rotated . k_rotated, the first term as (K[h]^T q_plain) . c
    value of head h = V[h] (sum of weight c), of each token's latent vector c

Chunks of many tokens are expanded instead where that is fewer FLOPs (``latent_chunks.py``): K[h] c and V[h] c
are made for each token of their context, in a pool of their own, and each head has keys and values.

A token's numbers in the cache, and those of a head's query, are in the order [first of the rotated pairs,
half of the latent vector, second of the pairs, its other half]: rope turns number i with number i + half
(``rope.py``). The products with K and V are a call for each head: a row's bits do not depend on its batch.
K and V are in the model's type, whatever the checkpoint or ``--quantization`` makes of the other weights.

T: num_tokens, H: num_heads, R: rank, D: rotated + R, E: numbers of an expanded key or value.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.interface import AttentionInputs, RopeInputs
from ...kernels.reference import dequantize_int8, rotate
from .latent_chunks import ExpandedQueries, LatentChunks
from .latent_config import ATTENTION, LatentConfig
from .layers import LayerLoader

EPS = 1e-6  # of the inner norms; config.json's is of the others
EXPANDED_BYTES = 64 << 20  # of keys and values at once; a head at least


class LatentAttention:
    def __init__(self, config: LatentConfig, layer: str, load: LayerLoader, interleaved: bool) -> None:
        """``config``: of all ranks."""
        queries, name = config.num_heads * (config.plain + config.rotated), f"{layer}.{ATTENTION}"
        self._config = c = replace(config, num_heads=config.num_heads // load.rank.size)
        self._spread = load.spread
        self._kernels, self._interleaved = load.kernels, interleaved
        self._q_a = self._q_a_norm = None
        if c.query_rank:
            self._q_a = load.whole(f"{name}.q_a_proj", c.bias)
            self._q_a_norm = load.norm(f"{name}.q_a_layernorm")
        own, of = load.rank.rows(queries), f"{name}.{'q_b_proj' if c.query_rank else 'q_proj'}"
        self._q = load.column([of], False, own)
        self._kv_a = load.whole(f"{name}.kv_a_proj_with_mqa", c.bias)
        self._kv_a_norm = load.norm(f"{name}.kv_a_layernorm")
        heads = load.own_rows(f"{name}.kv_b_proj").view(c.num_heads, c.plain + c.value, c.rank)
        linear = load.kernels.linear
        self._keys = [linear(head[: c.plain].t().contiguous(), None, True) for head in heads]
        self._values = [linear(head[c.plain :].contiguous(), None, True) for head in heads]
        expanded = heads if load.expands_latent else ()
        self._expanded_keys = [linear(head[: c.plain].contiguous(), None, True) for head in expanded]
        self._o = load.row(f"{name}.o_proj", c.bias)

    def queries_and_key(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> [T, (H + 1) D], before rope."""
        return self._with_key(self._query_vector(x), x)

    def output(self, x: Tensor) -> Tensor:
        """Sums over keys [T, H D] -> [T, hidden_size]."""
        return self._o(self._values_of(self._latent(x)))

    def attend_own_blocks(self, q: Tensor, pool: Tensor, index: int, inputs: AttentionInputs) -> Tensor:
        """Queries [T, H, D] of sequences with one each, whose blocks are spread -> [T, hidden_size]."""
        return self._o(self._values_of(self._sums(q, pool, index, inputs)))

    def project_chunks(
        self, x: Tensor, pool: Tensor, index: int, rope: RopeInputs, chunks: LatentChunks
    ) -> ExpandedQueries:
        """Write the tokens' vectors to layer ``index`` of ``pool``; return their queries after rope."""
        if not chunks.expanded:
            q = self._kernels.rope_and_store(self.queries_and_key(x), pool, index, rope)
            return ExpandedQueries(q[chunks.rows], q[chunks.other_rows], chunks)
        c, q, key = self._config, self._queries(self._query_vector(x)), self._key(x)
        own, others = (
            replace(rope, positions=rope.positions[rows], slot_mapping=rope.slot_mapping[rows])
            for rows in (chunks.rows, chunks.other_rows)
        )
        absorbed = q.new_empty(0, c.num_heads, c.cached)
        if len(chunks.other_rows):
            rows = chunks.other_rows
            qkv = torch.cat((self._absorbed(q[rows]), key[rows, None]), dim=1).flatten(1)
            absorbed = self._kernels.rope_and_store(qkv, pool, index, others)
        self._kernels.rope_and_store(key[chunks.rows], pool, index, replace(own, num_heads=0))
        own_q = q[chunks.rows]
        plain, rotated = own_q[..., : c.plain], own_q[..., c.plain :]
        cos, sin = rope.cos_sin[own.positions].unsqueeze(1).chunk(2, dim=-1)
        pairs, first = torch.cat(self._pairs(rotated), dim=-1), c.rotated // 2
        turned = rotate(pairs, torch.cat((cos[..., :first], sin[..., :first]), dim=-1))
        padding = q.new_zeros(*plain.shape[:2], c.expanded - c.plain - c.rotated)
        return ExpandedQueries(torch.cat((plain, turned, padding), dim=-1), absorbed, chunks)

    def attend_chunks(self, q: ExpandedQueries, pool: Tensor, index: int) -> Tensor:
        """Queries [T, ...] -> [T, hidden_size]."""
        c, chunks, count = self._config, q.chunks, len(q.whole) + len(q.absorbed)
        values = q.whole.new_empty(count, c.num_heads, c.value)
        if len(q.absorbed):
            sums = self._sums(q.absorbed, pool, index, chunks.others)
            values[chunks.other_rows] = self._values_of(sums).view(-1, c.num_heads, c.value)
        counts = [group.num_rows for group in chunks.groups]
        for group, rows, whole in zip(
            chunks.groups, torch.split(chunks.rows, counts), torch.split(q.whole, counts), strict=True
        ):
            vectors = self._vectors(pool, index, group.blocks, chunks.others.kv_scales, whole.dtype)
            if chunks.expanded:
                self._attend_expanded(whole, vectors, group.attention, rows, values)
            else:
                pool_of_them = vectors.view(len(vectors), 1, 1, 1, *vectors.shape[1:])
                sums = self._latent(self._kernels.paged_attention(whole, pool_of_them, 0, group.attention))
                values[rows] = self._values_of(sums).view(-1, c.num_heads, c.value)
        return self._o(values.flatten(1))

    def _attend_expanded(
        self, q: Tensor, vectors: Tensor, inputs: AttentionInputs, rows: Tensor, values: Tensor
    ) -> None:
        """Write the heads' values of queries [n, H, E], over the blocks ``vectors`` [blocks, block_size, D],
        to ``rows`` of ``values`` [T, H, value]."""
        c = self._config
        latent, rotated = self._parts(vectors)
        latent = latent.flatten(0, 1).contiguous()
        head_bytes = 2 * vectors.shape[0] * vectors.shape[1] * c.expanded * vectors.itemsize
        at_once = max(1, EXPANDED_BYTES // head_bytes)
        for heads in torch.split(torch.arange(c.num_heads), at_once):
            expanded = self._expanded(latent, rotated, heads.tolist())
            own = q[:, heads[0] : heads[-1] + 1]
            sums = self._kernels.paged_attention(own, expanded, 0, inputs)
            values[rows[:, None], heads] = sums.view(*own.shape)[..., : c.value]

    def _expanded(self, latent: Tensor, rotated: Tensor, heads: list[int]) -> Tensor:
        """Latent vectors [blocks * block_size, R] and rotated keys [blocks, block_size, rotated] -> a pool of
        these heads: [blocks, 1, 2, heads, block_size, E]."""
        c, shape = self._config, rotated.shape[:2]
        pool = latent.new_zeros(shape[0], 1, 2, len(heads), shape[1], c.expanded)
        keys = torch.zeros_like(pool[:, 0, 0])
        keys[..., c.plain : c.plain + c.rotated] = rotated[:, None]
        for i, head in enumerate(heads):
            keys[:, i, :, : c.plain] = self._expanded_keys[head](latent).view(*shape, -1)
            pool[:, 0, 1, i, :, : c.value] = self._values[head](latent).view(*shape, -1)
        pool[:, 0, 0] = in_groups(keys, self._kernels.key_group)
        return pool

    def _vectors(
        self, pool: Tensor, index: int, blocks: Tensor, scales: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Blocks of the cache, [blocks, block_size, D]."""
        vectors = pool[blocks, index, 0, 0]
        if self._spread is not None:
            vectors = self._spread.gathered(vectors)
        if pool.dtype == torch.int8:
            return dequantize_int8(vectors).to(dtype)
        return vectors if scales is None else (vectors.float() * scales[index, 0, 0]).to(dtype)

    def _query_vector(self, x: Tensor) -> Tensor:
        """[T, query_rank], or x itself."""
        if self._q_a is None or self._q_a_norm is None:
            return x
        return self._kernels.rms_norm(self._q_a(x), self._q_a_norm, EPS)

    def _queries(self, vector: Tensor) -> Tensor:
        """[T, H, plain + rotated], before rope."""
        c = self._config
        return self._q(vector).view(len(vector), c.num_heads, c.plain + c.rotated)

    def _with_key(self, vector: Tensor, x: Tensor) -> Tensor:
        """See ``queries_and_key``."""
        return torch.cat((self._absorbed(self._queries(vector)), self._key(x)[:, None]), dim=1).flatten(1)

    def _absorbed(self, q: Tensor) -> Tensor:
        """[T, H, plain + rotated] -> [T, H, D]."""
        c, by_head = self._config, q.transpose(0, 1)
        plain = by_head[..., : c.plain].contiguous()
        latent = torch.stack([key(head) for key, head in zip(self._keys, plain, strict=True)])
        return self._in_order(by_head[..., c.plain :], latent).transpose(0, 1)

    def _key(self, x: Tensor) -> Tensor:
        """[T, D], before rope."""
        c, kv = self._config, self._kv_a(x)
        normed = self._kernels.rms_norm(kv[:, : c.rank].contiguous(), self._kv_a_norm, EPS)
        return self._in_order(kv[:, c.rank :], normed)

    def _sums(self, q: Tensor, pool: Tensor, index: int, inputs: AttentionInputs) -> Tensor:
        """[T, H, D] -> [T, H, R]."""
        if self._spread is None:
            return self._latent(self._kernels.paged_attention(q, pool, index, inputs))
        merged = []
        for rows, own in self._spread.slices(inputs):
            queries = self._spread.queries(q[rows])
            sums, lse = self._kernels.partial_attention(queries, pool, index, own)
            merged.append(self._spread.merged(self._latent(sums), lse))
        return merged[0] if len(merged) == 1 else torch.cat(merged)

    def _latent(self, x: Tensor) -> Tensor:
        """Sums over keys [T, heads D] -> [T, heads, R]."""
        return self._parts(x.view(len(x), -1, self._config.cached))[0]

    def _values_of(self, latent: Tensor) -> Tensor:
        """[T, H, R] -> [T, H value]."""
        by_head = latent.transpose(0, 1).contiguous()  # [H, T, R]
        return torch.cat([value(head) for value, head in zip(self._values, by_head, strict=True)], dim=-1)

    def _pairs(self, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """[..., rotated] -> the first and the second number of each pair."""
        if self._interleaved:
            return rotated[..., 0::2], rotated[..., 1::2]
        first, second = rotated.chunk(2, dim=-1)
        return first, second

    def _in_order(self, rotated: Tensor, latent: Tensor) -> Tensor:
        """[..., rotated] and [..., R] -> [..., D]."""
        first, second = self._pairs(rotated)
        left, right = latent.chunk(2, dim=-1)
        return torch.cat((first, left, second, right), dim=-1)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] -> [..., R], and the rotated pairs [..., rotated], first numbers before second ones."""
        first, half = self._config.rotated // 2, self._config.cached // 2
        latent = torch.cat((x[..., first:half], x[..., half + first :]), dim=-1)
        return latent, torch.cat((x[..., :first], x[..., half : half + first]), dim=-1)


def in_groups(keys: Tensor, group: int) -> Tensor:
    """[..., block_size, E], as the pools of kernels with this ``key_group`` hold keys."""
    shape, word = keys.shape, 4 // keys.itemsize
    if shape[-2] % group:
        return keys
    return keys.view(*shape[:-2], -1, group, shape[-1] // word, word).transpose(-3, -2).reshape(shape)
