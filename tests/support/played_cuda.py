"""CUDA between processes of one host, played in this one."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from splitserve.transport.movers.cudart import HANDLE_BYTES, Column

from .sharded_pools import Shards


class Cuda:
    """CUDA of one GPU of a host whose GPUs are all in this process's memory. A copy happens when its event is
    asked for. ``mapped``: the pools that are mapped and not unmapped."""

    OFFSET = 64  # of a pool in its allocation

    def __init__(self, host: Host, device: torch.device) -> None:
        self._host, self._device = host, device
        self._begun: list[tuple[Column, Column, int, int] | int] = []
        self._num_events = self._over = 0

    def share(self, pointer: int) -> tuple[bytes, int]:
        assert self._host.places[pointer][0] == self._device
        return (pointer - self.OFFSET).to_bytes(HANDLE_BYTES, "little"), self.OFFSET

    def map(self, handle: bytes) -> int:
        self._host.num_mapped += 1
        return int.from_bytes(handle, "little")

    def unmap(self, pointer: int) -> None:
        self._host.num_mapped -= 1

    def new_stream(self) -> Any:
        return self

    def end_stream(self, stream: Any) -> None:
        assert not self._begun

    def copy(self, target: Column, source: Column, width: int, num_rows: int, stream: Any) -> None:
        assert stream is self
        assert self._host.at(source, width, num_rows) == self._device, "a GPU copies what is its own"
        self._host.at(target, width, num_rows)
        self._host.num_copies += 1
        self._begun.append((target, source, width, num_rows))

    def record(self, stream: Any) -> Any:
        self._num_events += 1
        self._begun.append(self._num_events)
        return self._num_events

    def is_over(self, event: Any) -> bool:
        assert event > self._over, "an event that was over is gone"
        while self._over < event and self._begun:
            if isinstance(what := self._begun.pop(0), int):
                self._over = what
                return what == event
            target, source, width, num_rows = what
            for row in range(num_rows):
                ctypes.memmove(
                    target.address + row * target.pitch, source.address + row * source.pitch, width
                )
        return False


class Host:
    """The GPUs with these pools. ``places``: GPU and bytes of each pool, by address."""

    def __init__(self, *pools: Shards) -> None:
        self.places = {
            pointer: (device, part.nbytes)
            for pool in pools
            for (pointer, device, _), part in zip(pool.blocks.shards, pool.parts, strict=True)
        }
        self.num_mapped = self.num_copies = 0
        self._gpus: dict[torch.device, Cuda] = {}

    def runtime(self, device: torch.device) -> Cuda:
        return self._gpus.setdefault(device, Cuda(self, device))

    def at(self, column: Column, width: int, num_rows: int) -> torch.device:
        """Return the GPU that holds all of these rows."""
        for pointer, (device, num_bytes) in self.places.items():
            if pointer <= column.address < pointer + num_bytes:
                assert width <= column.pitch
                assert column.address + (num_rows - 1) * column.pitch + width <= pointer + num_bytes
                return device
        raise AssertionError("a copy from or to no pool")
