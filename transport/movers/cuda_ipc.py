"""The ``cuda_ipc`` mover: the decode worker's pool on a GPU, mapped into a prefill worker of the same host; a
put is a copy from device to device on a stream of its own, beside the computation. The two may share one GPU.

With several GPUs each copies to each of the peer's the heads that both hold, whatever the two numbers; or, of
blocks that are spread over GPUs, each GPU its own. The
handles travel over the encrypted control channel, 64 bytes each that only CUDA reads. As with ``shm``, a
process that has mapped the pool can write as long as it lives.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from ..errors import MoverError
from ..messages.messages import PeerId
from .block_memory import DevicePool
from .cudart import HANDLE_BYTES, Column, CudaRuntime, LoadRuntime
from .interface import Arrival, BackgroundSource, Items, OneSidedTarget, PeerProcess, layer_slice, runs

PUT_S, SLOWEST_BYTES_PER_S = 5.0, 1e9  # a put may take that long, and as long as its bytes at that rate
CLOSE_S, LOOK_S = 5.0, 0.001
_ADDRESS = struct.Struct(f"<{HANDLE_BYTES}sQi")  # of a pool on one GPU: handle, offset in it, process id
_SHARDED = struct.Struct("<iHH")  # on several: process id, planes, heads (0, 0: spread); then for each GPU
_SHARD = struct.Struct(f"<{HANDLE_BYTES}sQHH")  # handle, offset in it, first head, number of heads
_Shared: TypeAlias = tuple[bytes, int, range]
"""What a peer's GPU shares: handle, offset and heads."""


class CudaIpcTarget(OneSidedTarget):
    """The receiving side, for all writers."""

    def __init__(self, pool: DevicePool, runtime: LoadRuntime) -> None:
        """Raises MoverError where CUDA cannot share the pool."""
        shared = [(*runtime(device).share(pointer), heads) for pointer, device, heads in pool.shards]
        if len(shared) == 1:
            self._address = _ADDRESS.pack(*shared[0][:2], os.getpid())
        else:
            rows = (0, 0) if pool.spread > 1 else pool.rows
            self._address = _SHARDED.pack(os.getpid(), *rows) + b"".join(
                _SHARD.pack(handle, offset, heads.start, len(heads)) for handle, offset, heads in shared
            )

    def address(self, peer: PeerId) -> bytes:
        return self._address


def _parsed(address: bytes, own: DevicePool) -> tuple[int, Sequence[int], int, list[_Shared]]:
    """Return the peer's process id, and its pool's ``rows``, ``spread`` and parts. Raises MoverError where
    its blocks cannot be like those of ``own``."""
    if len(address) == _ADDRESS.size:
        handle, offset, pid = _ADDRESS.unpack(address)
        return pid, own.rows, 1, [(handle, offset, range(own.rows[1]))]
    if len(address) <= _SHARDED.size or (len(address) - _SHARDED.size) % _SHARD.size:
        raise MoverError("the decode worker shares no pool on a GPU")
    pid, *rows = _SHARDED.unpack_from(address)
    shards = [
        (handle, offset, range(first, first + count))
        for handle, offset, first, count in _SHARD.iter_unpack(address[_SHARDED.size :])
    ]
    spread = 1
    if rows == [0, 0]:
        rows, spread = [1, 1], len(shards)
    fits = all(rows) and own.shape[2] % (rows[0] * rows[1]) == 0
    fits = fits and (len(own.shards) == 1 or own.rows == tuple(rows))
    if not fits or not _are_all([heads for *_, heads in shards], rows[1]):
        raise MoverError("the decode worker's GPUs share no pool with blocks like those of this one")
    return pid, rows, spread, shards


def _are_all(held: Iterable[range], num_heads: int) -> bool:
    """Return whether these are all heads in order, where GPUs one after the other may hold the same."""
    end = 0
    for heads in dict.fromkeys(held):
        if not heads or heads.start != end:
            return False
        end = heads.stop
    return end == num_heads


class _Lane(NamedTuple):
    """The heads that an own GPU and a peer's have in common: ``width`` bytes of each row, which is a plane of
    a layer. ``of``, ``to``: the numbers of the two GPUs among those that blocks are spread over."""

    cuda: CudaRuntime
    stream: Any
    mapped: int
    source: Column
    target: Column
    width: int
    of: int
    to: int


class CudaIpcSource(BackgroundSource):
    """The sending side: the peer's pool, mapped."""

    def __init__(self, address: bytes, num_blocks: int, pool: DevicePool, runtime: LoadRuntime) -> None:
        """``pool``: the own. Raises MoverError where the peer's cannot be mapped."""
        pid, rows, self._spread, shards = _parsed(address, pool)
        self._num_blocks, self._shape, self._planes = num_blocks, pool.shape, rows[0]
        self._own_spread = pool.spread
        super().__init__()
        self._process = PeerProcess(pid)
        self._streams: list[tuple[CudaRuntime, Any]] = []
        self._lanes: list[_Lane] = []
        try:
            self._map(rows, shards, pool, runtime)
        except MoverError:
            with suppress(MoverError):
                self._release()
            self._process.close()
            raise

    def put(
        self, lease: int, secret: bytes, items: Items, first_layer: int = 0, num_layers: int | None = None
    ) -> None:
        layers = layer_slice(self._shape, first_layer, num_layers)
        shape = (*self._shape[:2], self._planes)
        found = runs(items, layers, shape, self._num_blocks, 0, 0)  # in rows
        self._process.check()
        mine, theirs = self._own_spread, self._spread
        for cuda, stream, _, source, target, width, of, to in self._lanes:
            both = found
            if mine > 1 or theirs > 1:
                own = [(i, a // mine, b // theirs) for i, a, b in items if (a % mine, b % theirs) == (of, to)]
                both = runs(own, layers, shape, self._num_blocks, 0, 0)
            for rows in both:
                cuda.copy(target.row(rows.target), source.row(rows.source), width, rows.num_bytes, stream)
        num_bytes = sum(rows.num_bytes for rows in found) * self._shape[2] // self._planes
        self._begin(lease, items, self._record(), PUT_S + num_bytes / SLOWEST_BYTES_PER_S)

    def poll(self) -> list[Arrival]:
        self._process.check()  # also when idle: the memory of a dead process stays as long as it is mapped
        left: list[Arrival] = []
        while self._puts and _are_over(self._puts[0].handle):  # on each stream they end in order
            left += self._puts.pop(0).arrivals
        if self._puts and time.monotonic() > self._puts[0].deadline:
            raise MoverError("a copy between GPUs was not complete in time")
        return left

    def close(self) -> tuple[()]:
        """Waits for what is under way. Raises MoverError where the GPU does not end it: only the end of this
        process can then be believed to end the writing, so nobody may catch it and go on."""
        self._process.close()
        self._begin(0, (), self._record(), 0.0)  # behind copies of a put that raised
        until = time.monotonic() + CLOSE_S
        while self._puts:
            if _are_over(self._puts[0].handle):
                self._puts.pop(0)
            elif time.monotonic() > until:
                raise MoverError("copies between GPUs do not end: this worker has to be started anew")
            else:
                time.sleep(LOOK_S)
        self._release()
        return ()

    def _map(
        self, rows: Sequence[int], peers: Sequence[_Shared], pool: DevicePool, runtime: LoadRuntime
    ) -> None:
        head_bytes = pool.shape[2] // (rows[0] * rows[1])
        first = {
            (heads, number % pool.spread): (pointer, device)
            for number, (pointer, device, heads) in reversed([*enumerate(pool.shards)])
        }
        if len(pool.shards) == 1:
            first = {(range(rows[1]), 0): pool.shards[0][:2]}
        for (own, of), (pointer, device) in first.items():
            cuda = runtime(device)
            self._streams.append((cuda, stream := cuda.new_stream()))
            for to, (handle, offset, theirs) in enumerate(peers):
                both = range(max(own.start, theirs.start), min(own.stop, theirs.stop))
                if both:
                    mapped = cuda.map(handle)
                    source = pointer + (both.start - own.start) * head_bytes
                    target = mapped + offset + (both.start - theirs.start) * head_bytes
                    columns = Column(source, len(own) * head_bytes), Column(target, len(theirs) * head_bytes)
                    numbers = of, to % self._spread
                    self._lanes.append(
                        _Lane(cuda, stream, mapped, *columns, len(both) * head_bytes, *numbers)
                    )

    def _record(self) -> list[tuple[CudaRuntime, Any]]:
        return [(cuda, cuda.record(stream)) for cuda, stream in self._streams]

    def _release(self) -> None:
        for lane in self._lanes:
            lane.cuda.unmap(lane.mapped)
        for cuda, stream in self._streams:
            cuda.end_stream(stream)


def _are_over(events: list[tuple[CudaRuntime, Any]]) -> bool:
    """Forget the events that are over. Return whether all are."""
    while events and events[0][0].is_over(events[0][1]):
        events.pop(0)
    return not events
