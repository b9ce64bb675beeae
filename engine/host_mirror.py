"""A copy in host memory of those blocks of a GPU's KV pool that travel: movers know host memory only.

Row ``i`` of the mirror belongs to block ``i`` of the pool. Copies run on the calling thread in the default stream, so that they come
after the step that wrote the blocks and before the step that reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .kv_cache import PoolAllocator


class HostMirror:
    """``device_pool``: uint8 [num_blocks, ...] on any device."""

    def __init__(self, device_pool: Tensor, allocate: PoolAllocator | None = None) -> None:
        """``allocate``: where the mirror's memory comes from (shared memory, say); None: from torch, page-locked for a GPU."""
        self._device_pool = device_pool
        if allocate is None:
            self._host = torch.empty(device_pool.shape, dtype=torch.uint8, pin_memory=device_pool.is_cuda)
        else:
            num_bytes = device_pool.numel()
            self._host = torch.frombuffer(allocate(num_bytes), dtype=torch.uint8, count=num_bytes).view(device_pool.shape)

    @property
    def pool(self) -> NDArray[np.uint8]:
        """uint8, of the device pool's shape: for the movers."""
        view: NDArray[np.uint8] = self._host.numpy()
        return view

    def fetch(self, blocks: Sequence[int]) -> None:
        """Brings these blocks from the device: before they are sent."""
        index = torch.tensor(blocks)
        self._host[index] = self._device_pool[index.to(self._device_pool.device)].cpu()

    def store(self, blocks: Sequence[int]) -> None:
        """Brings these blocks to the device: after they have arrived."""
        index = torch.tensor(blocks)
        self._device_pool[index.to(self._device_pool.device)] = self._host[index].to(self._device_pool.device)
