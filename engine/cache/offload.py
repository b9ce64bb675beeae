"""Which blocks of a cache are written to the KV store: each once, the oldest first, but those known to be
there. Pure.

They are written when a quarter or less of the cache is free, so that few are evicted before; and when the
worker has nothing else to do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from .block_manager import BlockManager


class Offload:
    """The cached blocks of one worker that have not been written."""

    def __init__(self, blocks: BlockManager, is_stored: Callable[[bytes], bool]) -> None:
        """``is_stored``: whether the block of a hash need not be written."""
        self._blocks, self._events, self._is_stored = blocks, blocks.watch(), is_stored
        self._left: dict[bytes, None] = {}

    def take(self, count: int, idle: bool) -> tuple[list[bytes], list[int]]:
        """Return the hashes and the numbers of up to ``count`` blocks to be written now. ``idle``: the worker
        has nothing else to do."""
        stored, removed = self._events.take()
        self._left.update(dict.fromkeys(block for block in stored if not self._is_stored(block)))
        for block_hash in removed:
            self._left.pop(block_hash, None)
        if not (idle or self._blocks.num_free <= self._blocks.num_blocks // 4):
            return [], []
        hashes = list(islice(self._left, count))
        for block_hash in hashes:
            del self._left[block_hash]
        return hashes, self._blocks.find(hashes)
