"""Host memory by which the ``tcp`` mover reads and writes a pool on a GPU: one page-locked record.

Each sending connection has one, and each receiving end. So a worker page-locks RECORD_BYTES for each
connection that it sends by, however large its pool is, and one that waits for its peer keeps nothing that
another one needs. A record is copied when its turn comes: a slow network holds the copies back. A tier of
blocks in host memory would fill and read its blocks the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..block_memory import DevicePool
from ..interface import Pool
from .parcels import RECORD_BYTES, Span, records


class HostBytes:
    """The bytes of a pool in host memory: they are read where they are."""

    def __init__(self, pool: Pool) -> None:
        self._bytes = pool.reshape(-1).data

    def batches(self, body: Sequence[Span]) -> Iterable[Sequence[Span]]:
        """Return the places of a body in pieces that ``read`` takes at once."""
        return (body,)

    def read(self, places: Sequence[Span]) -> list[memoryview]:
        return [self._bytes[start:end] for start, end in places]


class Staging:
    """The bytes of a pool on a GPU. For one thread at a time. The copies go to a stream of their own, beside
    the step that is running: what is read must be final, what is written must belong to no running
    sequence."""

    def __init__(self, pool: DevicePool) -> None:
        self._bytes, self._stream = pool.bytes, None
        if pool.device.type == "cuda":
            with torch.cuda.device(pool.device):  # else page-locking would make a context on GPU 0
                self._host = torch.empty(RECORD_BYTES, dtype=torch.uint8, pin_memory=True)
                self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        else:  # a GPU is rehearsed
            self._host = torch.empty(RECORD_BYTES, dtype=torch.uint8)
        self.buffer: memoryview = self._host.numpy().data

    def batches(self, body: Sequence[Span]) -> Iterable[Sequence[Span]]:
        """Return the places of a body in pieces that ``read`` takes at once."""
        return records(body)

    def read(self, places: Sequence[Span]) -> list[memoryview]:
        """Return these bytes of the pool, at most RECORD_BYTES, in one piece: good until the next call."""
        return [self.buffer[: self._copy(places, to_host=True)]]

    def write(self, record: Sequence[Span]) -> None:
        """Write the first bytes of ``buffer`` to these places of the pool. Return when they are there."""
        self._copy(record, to_host=False)

    def _copy(self, record: Sequence[Span], to_host: bool) -> int:
        at = 0
        with torch.cuda.stream(self._stream):
            for start, end in record:
                host, device = self._host[at : at + end - start], self._bytes[start:end]
                target, source = (host, device) if to_host else (device, host)
                target.copy_(source, non_blocking=True)
                at += end - start
        if self._stream is not None:
            self._stream.synchronize()
        return at
