"""DeepSeek's sparse attention (DeepSeek-V3.2-Exp, 2025, section 2.1): latent attention in which a token
attends to the ``chosen`` tokens that score highest by an index (kernels/sparse_index.py), of itself and those
before it. A token that sees no more than these attends to all of them: it is not scored.

An index key lies behind each block's latent vectors of its layer: a layer of a block is [block_size, D] of
these, then [block_size, I] of the keys. So keys go where their block goes, checked and stored with it.

T: num_tokens, H: num_heads, D: numbers of a latent vector, I: of an index key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from ...kernels.interface import AttentionInputs, RopeInputs
from .config import ModelConfig
from .latent_attention import LatentAttention
from .latent_chunks import ExpandedQueries, LatentChunks, of_sequences
from .latent_config import LatentConfig
from .layers import LayerLoader
from .rope import head_order
from .rope_config import RopeConfig
from .sparse_config import INDEXER, WEIGHTS, IndexConfig

EPS = 1e-6  # of the keys' norm


@dataclass(slots=True)
class SparseStep:
    """The tokens of a step that see more than ``count`` tokens, and the others.

    rows, others  int64: their token rows
    scored        of ``rows``, without those of their sequences before them
    dense         of ``others``, which attend to all
    slots         int32 [rows, count]: those that ``rows`` attend to in the layer at hand
    """

    count: int
    rows: Tensor
    others: Tensor
    scored: AttentionInputs
    dense: AttentionInputs
    slots: Tensor | None = None

    def of_rows(self, rows: Tensor, own: SparseStep | None) -> SparseStep | None:
        """Give ``own``, of queries of the token rows ``rows`` (int64) alone, what these have chosen."""
        if own is not None and self.slots is not None:
            own.slots = self.slots[torch.searchsorted(self.rows, rows[own.rows])]
        return own


def sparse_step(inputs: AttentionInputs, count: int) -> SparseStep | None:
    """None: no token sees more than ``count``. The inputs are on the CPU."""
    counts = inputs.query_start_loc.diff()
    first = inputs.seq_lens - counts  # position of each sequence's first token
    few = torch.minimum((count - first).clamp(min=0), counts)  # tokens that see no more
    if torch.equal(few, counts):
        return None
    row = torch.arange(int(counts.sum())) - inputs.query_start_loc[:-1].repeat_interleave(counts)
    many = row >= few.repeat_interleave(counts)
    ends = replace(inputs, seq_lens=first + few)
    return SparseStep(
        count, many.nonzero().flatten(), (~many).nonzero().flatten(),
        of_sequences(inputs, few < counts, counts - few), of_sequences(ends, few > 0, few),
    )  # fmt: skip


class SparseLatentAttention(LatentAttention):
    def __init__(
        self, config: LatentConfig, layer: str, load: LayerLoader, rope: RopeConfig, index: Indexer | None
    ) -> None:
        """``index``: None: the layer attends to the tokens that the one before it does."""
        super().__init__(config, layer, load, rope.interleaved)
        self._index = index

    def project(
        self, x: Tensor, pool: Tensor, layer: int, rope: RopeInputs, sparse: SparseStep | None
    ) -> Tensor:
        """x [T, hidden_size] -> queries [T, H, D]. Writes the tokens' vectors and index keys to ``layer`` of
        ``pool``, and chooses what they attend to."""
        vector = self._query_vector(x)
        latent, keys = self._parts_of(pool)
        q = self._kernels.rope_and_store(self._with_key(vector, x), latent, layer, rope)
        if self._index is not None:
            self._index.choose(x, vector, keys, layer, rope, sparse)
        return q

    def attend(
        self, q: Tensor, pool: Tensor, layer: int, attention: AttentionInputs, sparse: SparseStep | None
    ) -> Tensor:
        """Queries [T, H, D] -> sums over keys [T, H D]."""
        latent, attend = self._parts_of(pool)[0], self._kernels.paged_attention
        if sparse is None:
            return attend(q, latent, layer, attention)
        assert sparse.slots is not None, "the first layer has an index"
        single = replace(
            sparse.scored,
            query_start_loc=torch.arange(len(sparse.rows) + 1, dtype=torch.int32),
            seq_lens=torch.full((len(sparse.rows),), sparse.count, dtype=torch.int32),
            block_tables=sparse.slots,
            slots=True,
        )
        if not len(sparse.others):
            return attend(q, latent, layer, single)
        sums = q.new_empty(len(q), q.shape[1] * q.shape[2])
        sums[sparse.others] = attend(q[sparse.others], latent, layer, sparse.dense)
        sums[sparse.rows] = attend(q[sparse.rows], latent, layer, single)
        return sums

    def project_chunks(
        self, x: Tensor, pool: Tensor, index: int, rope: RopeInputs, chunks: LatentChunks
    ) -> ExpandedQueries:
        latent, keys = self._parts_of(pool)
        if self._index is not None:
            self._index.choose(x, None, keys, index, rope, None)
        return super().project_chunks(x, latent, index, rope, chunks)

    def attend_chunks(self, q: ExpandedQueries, pool: Tensor, index: int) -> Tensor:
        return super().attend_chunks(q, self._parts_of(pool)[0], index)

    def _parts_of(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the latent vectors and of the index keys."""
        blocks, layers, _, _, block_size, row = pool.shape
        size = self._config.cached
        start = pool.storage_offset()

        def view(first: int, length: int) -> Tensor:
            strides = (*pool.stride()[:3], block_size * length, length, 1)
            return pool.as_strided(
                (blocks, layers, 1, 1, block_size, length), strides, start + block_size * first
            )

        return view(0, size), view(size, row - size)


def attention_of(
    config: ModelConfig, number: int, load: LayerLoader, index_cos_sin: Tensor | None
) -> LatentAttention:
    """Make this layer's. ``index_cos_sin``: of ``Indexer``; None: attention is not sparse."""
    assert config.latent is not None
    name, rope, c = config.tensors.layer_name(number), config.ropes[number], config.index
    if c is None or index_cos_sin is None:
        return LatentAttention(config.latent, name, load, rope.interleaved)
    index = Indexer(c, name, load, rope, index_cos_sin) if c.layers[number] else None
    return SparseLatentAttention(config.latent, name, load, rope, index)


class Indexer:
    """A layer's index. Every rank has the whole of it."""

    def __init__(
        self, config: IndexConfig, layer: str, load: LayerLoader, rope: RopeConfig, cos_sin: Tensor
    ) -> None:
        """``cos_sin``: of heads of ``head_dim``."""
        self._config, self._kernels, self._cos_sin = config, load.kernels, cos_sin
        name, heads = f"{layer}.{INDEXER}", torch.arange(config.num_heads)[:, None]
        order = torch.tensor(head_order(replace(rope, interleaved=config.interleaved), config.head_dim))
        self._q = load.column([f"{name}.wq_b"], False, (heads * config.head_dim + order).flatten())
        self._k = load.column([f"{name}.wk"], False, order)
        self._norm, self._bias = (
            load.checkpoint.tensor(f"{name}.k_norm.{of}").to(load.device, torch.float32)[order]
            for of in ("weight", "bias")
        )
        weights = load.checkpoint.tensor(f"{layer}.{WEIGHTS}.weight").to(load.device, torch.float32)
        self._weights = load.kernels.linear(weights, None, True)
        self._scale = (config.num_heads * config.head_dim) ** -0.5

    def choose(
        self, x: Tensor, vector: Tensor | None, pool: Tensor, layer: int, rope: RopeInputs,
        sparse: SparseStep | None,
    ) -> None:  # fmt: skip
        """Write the tokens' keys to ``pool``, of index keys. Where ``sparse`` is given, ``vector``, which
        queries are made of, is too: set its slots."""
        c, k = self._config, self._k(x)
        key = layer_norm(k.float(), k.shape[1:], self._norm, self._bias, EPS).to(x.dtype)
        rope = replace(rope, cos_sin=self._cos_sin, head_dim=c.head_dim, num_kv_heads=1, num_heads=0)
        if sparse is None or vector is None:
            self._kernels.rope_and_store(key, pool, layer, rope)
            return
        qk = torch.cat((self._q(vector), key), dim=1)
        q = self._kernels.rope_and_store(qk, pool, layer, replace(rope, num_heads=c.num_heads))
        weights = self._weights(x[sparse.rows].float()) * self._scale
        sparse.slots = self._kernels.index_slots(
            q[sparse.rows], weights, pool, layer, sparse.scored, c.chosen
        )
