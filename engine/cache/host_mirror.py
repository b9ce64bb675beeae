"""A copy in host memory of those blocks of a GPU's KV pool that travel: movers know host memory only.

Row ``i`` of the mirror belongs to block ``i`` of the pool. What is fetched must be final (the event of its
layer has passed): it is copied in a stream of its own, beside the step that is running. What is stored is
copied in the default stream, so that it comes before the step that reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.huge_pages import huge_page_bytes
from .kv_cache import PoolAllocator

_log = logging.getLogger(__name__)


class HostMirror:
    """``device_pool``: uint8 [num_blocks, ...] on any device."""

    def __init__(self, device_pool: Tensor, allocate: PoolAllocator | None = None) -> None:
        """``allocate``: makes the mirror's memory, such as shared memory; None: memory of this process
        alone."""
        self._device_pool = device_pool
        self._stream = None
        if device_pool.is_cuda:
            self._stream = torch.cuda.Stream(device_pool.device)  # type: ignore[no-untyped-call]
        num_bytes = device_pool.numel()
        if allocate is None:  # torch's own page-locked memory is rounded up to a power of two
            self._host = huge_page_bytes(num_bytes).view(device_pool.shape)
        else:
            self._host = torch.frombuffer(allocate(num_bytes), dtype=torch.uint8, count=num_bytes).view(
                device_pool.shape
            )
        if device_pool.is_cuda:
            lock_pages(self._host)

    @property
    def pool(self) -> NDArray[np.uint8]:
        """uint8, of the device pool's shape: for the movers."""
        view: NDArray[np.uint8] = self._host.numpy()
        return view

    def fetch(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int | None = None) -> None:
        """Brings ``num_layers`` layers of these blocks (None: all from ``first_layer``) from the device:
        before they are sent."""
        end = None if num_layers is None else first_layer + num_layers
        with torch.cuda.stream(self._stream):  # no effect if it is None
            for block in blocks:  # each a copy by the GPU itself, into page-locked memory
                self._host[block, first_layer:end].copy_(
                    self._device_pool[block, first_layer:end], non_blocking=True
                )
        if self._stream is not None:
            self._stream.synchronize()

    def store(self, blocks: Sequence[int]) -> None:
        """Brings these blocks to the device: after they have arrived. Does not wait: what reads them comes
        later in the same stream."""
        for block in blocks:
            self._device_pool[block].copy_(self._host[block], non_blocking=True)


def lock_pages(memory: Tensor) -> None:
    """Lets a GPU copy to and from this host memory by itself, at the bus's full rate. Goes on without where
    the driver refuses."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        _log.warning(
            "cannot lock %.2f GiB of host memory for the GPU (CUDA error %d): copies are slower",
            memory.nbytes / 2**30,
            error,
        )
