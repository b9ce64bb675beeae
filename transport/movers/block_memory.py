"""KV blocks as tensors, for movers that send packed ones: some layers of scattered blocks in one piece, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .interface import Pool


class BlockMemory(Protocol):
    """A pool of blocks [num_blocks, num_layers, layer_bytes]. Calls return when the work is done. For one thread at a time."""

    @property
    def device(self) -> torch.device: ...

    def pack(self, blocks: Sequence[int], layers: slice) -> Tensor:
        """uint8 [number of bytes]: these layers of each of these blocks in turn. Good until the next ``pack``."""

    def unpack(self, packed: Tensor, blocks: Sequence[int], layers: slice) -> None:
        """The other way."""


class HostMemory:
    """Blocks of a pool in host memory."""

    device = torch.device("cpu")

    def __init__(self, pool: Pool) -> None:
        self._pool = torch.from_numpy(pool)

    def pack(self, blocks: Sequence[int], layers: slice) -> Tensor:
        return self._pool[:, layers].index_select(0, torch.tensor(blocks)).view(-1)

    def unpack(self, packed: Tensor, blocks: Sequence[int], layers: slice) -> None:
        view = self._pool[:, layers]
        view.index_copy_(0, torch.tensor(blocks), packed.view(len(blocks), *view.shape[1:]))
