"""Pools of KV blocks on several GPUs, which are played or are the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.engine.cache.device_blocks import DeviceBlocks
from splitserve.engine.cache.sharded_blocks import ShardedBlocks
from splitserve.transport.movers.block_memory import DevicePool
from splitserve.transport.movers.interface import Pool

from .gpu_tensors import ON_GPUS

NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE, ROW = 12, 3, 4, 16  # a row: 16 numbers of 2 bytes


def heads_of(degree: int, num_kv_heads: int) -> list[range]:
    """What each of ``degree`` GPUs holds."""
    count = max(1, num_kv_heads // degree)
    starts = [rank * num_kv_heads // degree for rank in range(degree)]
    return [range(start, start + count) for start in starts]


def logical_pool(planes: int, num_kv_heads: int, seed: int | None = 0) -> NDArray[np.int16]:
    """[blocks, layers, planes, heads, block_size, row], random; ``seed`` None: empty."""
    shape = (NUM_BLOCKS, NUM_LAYERS, planes, num_kv_heads, BLOCK_SIZE, ROW)
    if seed is None:
        return np.zeros(shape, np.int16)
    return np.random.default_rng(seed).integers(-(1 << 15), 1 << 15, shape, np.int16)


def as_bytes(pool: NDArray[np.int16]) -> Pool:
    """[num_blocks, num_layers, layer_bytes] of the same memory."""
    return pool.reshape(NUM_BLOCKS, NUM_LAYERS, -1).view(np.uint8)


class Shards:
    """The pool ``logical`` on ``degree`` GPUs. ``spread``: each has blocks of its own."""

    def __init__(
        self, logical: NDArray[np.int16], degree: int, on_gpus: bool = False, spread: bool = False
    ) -> None:
        self.logical, self.heads = logical, heads_of(degree, logical.shape[3])
        self._spread = spread
        self.parts = [torch.from_numpy(part.copy()) for part in self._cut(logical)]
        places = ON_GPUS if on_gpus else [torch.Tensor] * degree
        self.pools = [part.as_subclass(place) for part, place in zip(self.parts, places, strict=False)]
        self.blocks: DevicePool = (
            ShardedBlocks(self.pools, self.heads, logical.shape[3], spread)
            if degree > 1
            else DeviceBlocks(self.pools[0].view(torch.uint8).view(NUM_BLOCKS, NUM_LAYERS, -1))
        )

    def hold(self, expected: NDArray[np.int16]) -> bool:
        """Return whether every GPU holds its part of ``expected``, and nothing else."""
        return all(
            np.array_equal(part.numpy(), own)
            for part, own in zip(self.parts, self._cut(expected), strict=True)
        )

    def _cut(self, logical: NDArray[np.int16]) -> list[NDArray[np.int16]]:
        if self._spread:
            return [logical[number :: len(self.heads)] for number in range(len(self.heads))]
        return [logical[:, :, :, own.start : own.stop] for own in self.heads]
