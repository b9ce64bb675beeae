"""The KV pools of a worker's GPUs as one pool of logical blocks: [num_layers, planes, num_kv_heads, ...],
whatever the number of GPUs. Workers of different numbers exchange blocks and compare their checksums.

Each GPU holds some heads of every block, or some blocks, in a pool of its own. All work goes to a stream of
each GPU's, beside the step that is running: see ``DeviceBlocks``. What is packed or summed is gathered on the
first GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ...kernels.gpu.kv_blocks import block_checksums

GATHERED_BYTES = 128 << 20  # at a time: many blocks are summed in the time of one


class ShardedBlocks:
    """``pools[r]``: [num_blocks, num_layers, planes, len(heads[r]), block_size, row] of any dtype, on its
    GPU. ``heads[r]``: which of ``num_kv_heads`` it holds: the same as another GPU, or none of them. Heads of
    several GPUs are written to all and read from the first. With ``spread`` each has all heads of its own
    blocks: block b lies on GPU b % len(pools) at place b // len(pools)."""

    def __init__(
        self, pools: Sequence[Tensor], heads: Sequence[range], num_kv_heads: int, spread: bool = False
    ) -> None:
        self.spread = len(pools) if spread else 1
        words = [pool.view(torch.uint8).view(*pool.shape[:4], -1).view(torch.int64) for pool in pools]
        num_blocks, num_layers, planes, _, self._head_words = words[0].shape
        self.device, self.rows = pools[0].device, (planes, num_kv_heads)
        self.shape = (num_blocks * self.spread, num_layers, planes * num_kv_heads * self._head_words * 8)
        self.shards = [(pool.data_ptr(), pool.device, own) for pool, own in zip(words, heads, strict=True)]
        for pool, own in zip(words, heads, strict=True):
            assert pool.is_contiguous()
            assert pool.shape == (num_blocks, num_layers, planes, len(own), self._head_words)
        self._parts = [
            (own, number % self.spread, pool)
            for number, (own, pool) in enumerate(zip(heads, words, strict=True))
        ]
        first = {(own, number): pool for own, number, pool in reversed(self._parts)}
        self._first = [(own, number, pool) for (own, number), pool in first.items()]
        held = sorted(head for own, _ in first for head in own)
        assert held == sorted([*range(num_kv_heads)] * self.spread), heads
        self._streams = [
            torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
            for pool in pools
            if pool.is_cuda
        ]
        self._lock = threading.Lock()  # movers' threads and the worker's loop use the same streams

    def warm_up(self) -> None:
        """Load or compile the kernels of all calls before a loop with a deadline makes them. No sequence may
        run yet: block 0 is written."""
        self.checksums([0])
        for layers in (slice(0, 1), slice(0, self.shape[1])):
            self.unpack(self.pack([0], layers), [0], layers)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """xxh3_64 of each of these logical blocks."""
        found: list[int] = []
        at_once = max(1, GATHERED_BYTES // (self.shape[1] * self.shape[2]))
        for start in range(0, len(blocks), at_once):
            with self._turn():
                packed = self._gather(blocks[start : start + at_once], slice(0, self.shape[1]))
                rows = torch.arange(len(packed), device=self.device)
                found += block_checksums(packed.flatten(1).view(torch.uint8), rows).tolist()
        return [value % (1 << 64) for value in found]

    def pack(self, blocks: Sequence[int], layers: slice) -> Tensor:
        """uint8 [number of bytes], on the first GPU: these layers of each of these logical blocks in turn."""
        with self._turn():
            packed = self._gather(blocks, layers)
        return packed.view(-1).view(torch.uint8)

    def unpack(self, packed: Tensor, blocks: Sequence[int], layers: slice) -> None:
        """The other way."""
        with self._turn():
            num_layers = layers.stop - layers.start
            data = packed.view(torch.int64).view(len(blocks), num_layers, *self.rows, self._head_words)
            for heads, number, pool in self._parts:
                rows, places = self._own(blocks, number)
                part = data[:, :, :, heads.start : heads.stop]
                if self.spread > 1:
                    part = part.index_select(0, _index(rows, self.device))
                pool[:, layers].index_copy_(0, _index(places, pool.device), part.to(pool.device))

    def _gather(self, blocks: Sequence[int], layers: slice) -> Tensor:
        """int64 [len(blocks), layers, planes, num_kv_heads, words of a head], on the first GPU."""
        size = (len(blocks), layers.stop - layers.start, *self.rows, self._head_words)
        packed = torch.empty(size, dtype=torch.int64, device=self.device)
        for heads, number, pool in self._first:
            rows, places = self._own(blocks, number)
            part = pool[:, layers].index_select(0, _index(places, pool.device))
            if self.spread > 1:
                packed.index_copy_(0, _index(rows, self.device), part.to(self.device))
            else:
                packed[:, :, :, heads.start : heads.stop].copy_(part)
        return packed

    def _own(self, blocks: Sequence[int], number: int) -> tuple[list[int], list[int]]:
        """Which of ``blocks`` lie on a GPU, and where there."""
        rows = [row for row, block in enumerate(blocks) if block % self.spread == number]
        return rows, [blocks[row] // self.spread for row in rows]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The lock, and a stream of each GPU's. The work is done when it ends."""
        with self._lock, ExitStack() as stack:
            for stream in reversed(self._streams):  # the first GPU is the current one: Triton launches there
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for stream in self._streams:
                stream.synchronize()


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(places, dtype=torch.int64, device=device)
