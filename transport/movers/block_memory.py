"""A pool of KV blocks wherever it lies, in host memory or on a GPU: as packed tensors, for movers that send
some layers of scattered blocks in one piece, and as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .interface import Pool, Span


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


Shard: TypeAlias = tuple[int, torch.device, range]
"""What one GPU holds of a pool: the address there, the GPU, and which KV heads of each plane."""


class DevicePool(BlockMemory, Protocol):
    """A pool on one GPU or several."""

    @property
    def shards(self) -> Sequence[Shard]:
        """What each GPU holds."""

    @property
    def rows(self) -> tuple[int, int]:
        """Planes of a layer, and heads of a plane: a layer's bytes are cut by these. (1, 1) on one GPU."""

    @property
    def spread(self) -> int:
        """Number of GPUs over which blocks are spread: block b lies on GPU b % spread alone, at place b //
        spread there. 1: each GPU has a part of every block."""

    @property
    def shape(self) -> tuple[int, ...]: ...

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
        # a memcpy each: torch's index_select takes ten times as long
        for piece, block in zip(packed, blocks, strict=True):
            np.copyto(piece, self._pool[block, layers])
        return torch.from_numpy(packed.reshape(-1))

    def unpack(self, packed: Tensor, blocks: Sequence[int], layers: slice) -> None:
        pieces = packed.numpy().reshape(len(blocks), *self._pool[0, layers].shape)
        for piece, block in zip(pieces, blocks, strict=True):
            np.copyto(self._pool[block, layers], piece)


def memory_of(pool: BlockPool) -> BlockMemory:
    return HostMemory(pool) if isinstance(pool, np.ndarray) else pool


def write_block(pool: BlockPool, block: int, data: NDArray[np.uint8]) -> None:
    """Fill a block with these bytes of host memory."""
    memory = memory_of(pool)
    memory.unpack(torch.tensor(data, device=memory.device), [block], slice(0, pool.shape[1]))


class Staging:
    """Bytes on a GPU, by ``num_bytes`` of page-locked host memory. For one thread at a time. The copies go to
    a stream of their own, beside the step that is running."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device, self._stream = device, None
        if device.type == "cuda":
            with torch.cuda.device(device):  # else page-locking would make a context on GPU 0
                self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        else:  # a GPU is rehearsed
            self._host = torch.empty(num_bytes, dtype=torch.uint8)
        self.buffer: memoryview = self._host.numpy().data

    def empty(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], on the GPU, to be written."""
        with torch.cuda.stream(self._stream):  # else it may be memory that a step under way still uses
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def read(self, data: Tensor, place: Span) -> memoryview:
        """Return these bytes of ``data``, at most ``num_bytes``: good until the next call."""
        return self.buffer[: self._copy(data, place, to_host=True)]

    def write(self, data: Tensor, place: Span) -> None:
        """Write the first bytes of ``buffer`` to this place of ``data``. Return when they are there."""
        self._copy(data, place, to_host=False)

    def _copy(self, data: Tensor, place: Span, to_host: bool) -> int:
        device = data[slice(*place)]
        host = self._host[: len(device)]
        target, source = (host, device) if to_host else (device, host)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return len(device)
