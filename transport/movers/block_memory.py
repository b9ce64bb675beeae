"""A pool of KV blocks wherever it lies, in host memory or on a GPU; and blocks as tensors, for movers that
send packed ones: some layers of scattered blocks in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .interface import Pool


class BlockMemory(Protocol):
    """A pool of blocks [num_blocks, num_layers, layer_bytes]. Calls return when the work is done. For one
    thread at a time."""

    @property
    def device(self) -> torch.device: ...

    def pack(self, blocks: Sequence[int], layers: slice) -> Tensor:
        """uint8 [number of bytes]: these layers of each of these blocks in turn. Good until the next
        ``pack``."""

    def unpack(self, packed: Tensor, blocks: Sequence[int], layers: slice) -> None:
        """Write ``packed`` into these layers of these blocks."""


class DevicePool(BlockMemory, Protocol):
    """A pool on a GPU."""

    @property
    def bytes(self) -> Tensor:
        """uint8 [number of bytes], the pool's own memory."""

    @property
    def pointer(self) -> int:
        """Address on its device."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        """Fill a block with these bytes of host memory."""

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Return the checksums of these blocks, equal to those of ``checksum.checksums``."""


BlockPool: TypeAlias = Pool | DevicePool
"""Both have a ``shape`` [num_blocks, num_layers, layer_bytes]."""


class HostMemory:
    """Blocks of a pool in host memory."""

    device = torch.device("cpu")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def pack(self, blocks: Sequence[int], layers: slice) -> Tensor:
        packed = np.empty((len(blocks), *self._pool[0, layers].shape), dtype=np.uint8)
        for piece, block in zip(
            packed, blocks, strict=True
        ):  # a memcpy each: torch's index_select takes ten times as long
            np.copyto(piece, self._pool[block, layers])
        return torch.from_numpy(packed.reshape(-1))

    def unpack(self, packed: Tensor, blocks: Sequence[int], layers: slice) -> None:
        pieces = packed.numpy().reshape(len(blocks), *self._pool[0, layers].shape)
        for piece, block in zip(pieces, blocks, strict=True):
            np.copyto(self._pool[block, layers], piece)


def memory_of(pool: BlockPool) -> BlockMemory:
    return HostMemory(pool) if isinstance(pool, np.ndarray) else pool
