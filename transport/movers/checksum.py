"""Checksum of a KV block: xxh3_64 over its bytes. Finds corruption, not forgery; runs at memory speed (0.08 s
a GB)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from .interface import Pool


def block_checksum(block: NDArray[np.uint8]) -> int:
    """Return the checksum of one block, contiguous."""
    checksum: int = xxh3_64_intdigest(block.data)
    return checksum


def checksums(pool: Pool, blocks: Sequence[int]) -> list[int]:
    """Return the checksums of these blocks of the pool, in this order."""
    return [block_checksum(pool[block]) for block in blocks]


class DeviceChecksums:
    """Checksums of own blocks on a GPU that are being sent, computed many at a time when they are asked for.
    Replaces RunningChecksums."""

    def __init__(self, compute: Callable[[Sequence[int]], list[int]]) -> None:
        self._compute = compute
        self._done: dict[int, int] = {}

    def add(self, blocks: Iterable[int], first_layer: int = 0, num_layers: int | None = None) -> None:
        """These layers of these blocks are being put: forget their checksums."""
        for block in blocks:
            self._done.pop(block, None)

    def of(self, blocks: Iterable[int]) -> list[int]:
        """Return the checksums of these blocks, all of whose layers are final."""
        wanted = list(blocks)
        if due := [block for block in wanted if block not in self._done]:
            self._done.update(zip(due, self._compute(due), strict=True))
        return [self._done[block] for block in wanted]


class RunningChecksums:
    """Checksums of own blocks that leave a few layers at a time: every byte is read once, while it is still
    in the cache of the put."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._begun: dict[int, tuple[int, xxh3_64]] = {}  # the layer expected next, and the sum so far
        self._done: dict[int, int] = {}

    def add(self, blocks: Iterable[int], first_layer: int = 0, num_layers: int | None = None) -> None:
        """Add these layers, which are being put. Layer 0 starts a block's checksum anew; the others follow in
        order."""
        size = self._pool.shape[1]
        end = size if num_layers is None else first_layer + num_layers
        for block in blocks:
            if (first_layer, end) == (0, size):
                self._done[block] = block_checksum(self._pool[block])
                continue
            expected, running = (0, xxh3_64()) if first_layer == 0 else self._begun.pop(block)
            assert expected == first_layer, f"layers of block {block} put out of order"
            running.update(self._pool[block, first_layer:end].data)
            if end == size:
                self._done[block] = running.intdigest()
            else:
                self._begun[block] = end, running

    def of(self, blocks: Iterable[int]) -> list[int]:
        """Return the checksums of these blocks, each of which has been put with its last layer; equal to
        ``block_checksum``."""
        return [self._done[block] for block in blocks]
