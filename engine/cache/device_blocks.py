"""A GPU's KV pool for movers: its address, packed pieces of it, and blocks' checksums, which are
those that a CPU computes of the same bytes.

All work goes to a stream of its own, beside the step that is running: what is read must be final, what is
written must belong to no running sequence. Calls return when the work is done.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...kernels.gpu.kv_blocks import block_checksums, pack_blocks, unpack_blocks


class DeviceBlocks:
    """``pool``: uint8 [num_blocks, num_layers, layer_bytes]."""

    def __init__(self, pool: Tensor) -> None:
        self.device = pool.device
        self.shape = tuple(pool.shape)
        self.rows, self.spread, self.shards = (1, 1), 1, [(pool.data_ptr(), pool.device, range(1))]
        self._blocks = pool.view(len(pool), -1)
        self._layer_bytes = pool.shape[2]
        self._stream = None
        if pool.is_cuda:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # movers' threads and the worker's loop use the one stream

    def warm_up(self) -> None:
        """Compile the kernels of all calls, for one layer and for all, before a loop with a deadline makes
        them. No sequence may run yet: block 0 is written."""
        self.checksums([0])
        for layers in (slice(0, 1), slice(0, self.shape[1])):
            self.unpack(self.pack([0], layers), [0], layers)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """xxh3_64 of each of these blocks."""
        with self._lock, self._on_stream():
            found = block_checksums(self._blocks, self._index(blocks)).cpu()
        return [value % (1 << 64) for value in found.tolist()]

    def pack(self, blocks: Sequence[int], layers: slice) -> Tensor:
        """uint8 [number of bytes]: these layers of each of these blocks in turn."""
        width = (layers.stop - layers.start) * self._layer_bytes
        with self._lock, self._on_stream():
            packed = torch.empty((len(blocks), width), dtype=torch.uint8, device=self.device)
            pack_blocks(self._blocks, self._index(blocks), packed, layers.start * self._layer_bytes)
            self._finish()
        return packed.view(-1)

    def unpack(self, packed: Tensor, blocks: Sequence[int], layers: slice) -> None:
        """The other way."""
        with self._lock, self._on_stream():
            unpack_blocks(
                packed.view(len(blocks), -1),
                self._index(blocks),
                self._blocks,
                layers.start * self._layer_bytes,
            )
            self._finish()

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, device=self.device)

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)  # no effect if it is None

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
