"""The pool of KV blocks: one tensor, block-major, so that a block of all layers is one contiguous run of
bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.huge_pages import advise_huge_pages, huge_page_bytes, populate
from ...kernels.interface import INT8_SCALE_BYTES
from ...transport.messages.cache_map import Kind, Plane, planes
from ..device import available_bytes
from ..errors import OutOfMemoryError
from ..model.config import ModelConfig

PoolAllocator = Callable[[int], memoryview]
"""Given a number of bytes, a writable buffer of at least that size: e.g. shared memory that other processes
map."""


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """What one block looks like: [num_layers, planes, num_kv_heads, block_size, head_dim].

    ``planes``: keys and values, or 1 where each key is its value, too. ``head_dim`` includes an index
    key's numbers (``sparse_attention.py``). In int8 a row of head_dim numbers is longer by its scale.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    planes: int = 2
    state_blocks: int = 0  # for the state of a sequence's layers without keys and values

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> KVCacheLayout:
        """Raises ModelConfigError where such blocks cannot hold the model's states."""
        states = config.states
        return cls(
            config.num_cache_layers,
            block_size,
            config.num_kv_heads,
            config.cached_row,
            dtype,
            config.kv_planes,
            states.num_blocks(block_size, dtype.itemsize) if states is not None else 0,
        )

    @property
    def block_shape(self) -> tuple[int, ...]:
        row = self.head_dim + (INT8_SCALE_BYTES if self.dtype == torch.int8 else 0)
        return (self.num_layers, self.planes, self.num_kv_heads, self.block_size, row)

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.block_shape)) * self.dtype.itemsize

    @property
    def cache_map(self) -> tuple[Plane, ...]:
        kinds: tuple[Kind, ...] = ("key", "value") if self.planes == 2 else ("latent",)
        plane_bytes = self.block_bytes // (self.planes * self.num_layers)
        return planes(self.num_layers, self.num_kv_heads, plane_bytes, kinds)


class KVCache:
    """Owns the pool. ``pool`` is [num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim]."""

    def __init__(
        self,
        layout: KVCacheLayout,
        num_blocks: int,
        device: torch.device,
        allocate: PoolAllocator | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        num_bytes = num_blocks * layout.block_bytes
        wanted = f"a KV cache of {num_blocks} blocks ({num_bytes / 2**30:.2f} GiB)"
        free = available_bytes(device)
        if num_bytes > free:
            raise OutOfMemoryError(
                f"{wanted} does not fit: {free / 2**30:.2f} GiB are free, enough for "
                f"{free // layout.block_bytes} blocks; lower --kv-cache-gib or --num-blocks"
            )
        try:
            raw = _allocate(num_bytes, device, allocate)
        except (RuntimeError, MemoryError, OSError) as error:
            raise OutOfMemoryError(
                f"{wanted} could not be allocated ({error}); lower --kv-cache-gib or --num-blocks"
            ) from error
        if device.type == "cpu":
            populate(raw)
        self.pool: Tensor = raw.view(layout.dtype).view(num_blocks, *layout.block_shape)
        self._raw = raw

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    @property
    def block_bytes_view(self) -> NDArray[np.uint8]:
        """uint8 [num_blocks, block_bytes] over the pool's own memory (CPU pools)."""
        view: NDArray[np.uint8] = self._raw.numpy().reshape(self.num_blocks, self.layout.block_bytes)
        return view

    @property
    def layer_bytes_view(self) -> NDArray[np.uint8]:
        """uint8 [num_blocks, num_layers, layer_bytes] over the pool's own memory (CPU pools)."""
        return self.block_bytes_view.reshape(self.num_blocks, self.layout.num_layers, -1)


def _allocate(num_bytes: int, device: torch.device, allocate: PoolAllocator | None) -> Tensor:
    """uint8 [num_bytes]."""
    if allocate is None and device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if allocate is None:
        return huge_page_bytes(num_bytes)
    buffer = allocate(num_bytes)
    assert not buffer.readonly, "the pool buffer must be writable"
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes)
    advise_huge_pages(raw)
    return raw
