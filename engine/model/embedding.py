"""The first residual of a step, of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import ModelConfig
from .gguf_blocks import QuantisedTable
from .layers import LayerLoader


class Embedding:
    def __init__(self, config: ModelConfig, load: LayerLoader) -> None:
        self.table = load.vocabulary_table(config.tensors.embed)
        self._kernels, self._dtype = load.kernels, load.dtype
        self._scale = config.scales.embedding / config.scales.residual
        if config.scales.rounds_embedding:
            self._scale = torch.tensor(self._scale, dtype=load.dtype).item()
        self._means: Tensor | None = None
        if config.layer_norms:
            assert isinstance(self.table, Tensor), "no family of GGUF's has LayerNorm"
            parts = torch.split(self.table, 4096)  # the whole is never held in float32
            self._means = torch.cat([rows.float().mean(1, keepdim=True) for rows in parts])

    def __call__(self, token_ids: Tensor, table: Tensor | QuantisedTable | None = None) -> Tensor:
        """The residual [T, E] before the first layer, divided by ``Scales.residual``: see
        ``ModelConfig.residual_eps``. ``table``: None: the model's own."""
        table = self.table if table is None else table
        if isinstance(table, Tensor):
            residual = self._kernels.embedding(table, token_ids, self._dtype)
        else:
            residual = table.rows(token_ids).to(self._dtype)
        if self._means is not None:
            residual -= self._means[token_ids]
        return residual if self._scale == 1.0 else residual.mul_(self._scale)
