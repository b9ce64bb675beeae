"""The mover cuda_ipc, with a stand-in for CUDA whose copies happen on the test's command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.kv_pools import DEADLINE_S, NUM_BLOCKS, NUM_LAYERS, POOL_SHAPE, SECRET, empty_pool, filled_pool

from splitserve.transport.errors import MoverError, PeerEnded
from splitserve.transport.movers import cuda_ipc, nixl, opening
from splitserve.transport.movers.cuda_ipc import CudaIpcSource, CudaIpcTarget
from splitserve.transport.movers.cudart import HANDLE_BYTES, Column
from splitserve.transport.movers.interface import Pool
from splitserve.transport.movers.opening import offered
from splitserve.transport.movers.targets import MoverTargets

BEFORE = 512  # bytes of the allocation before the pool
WRITER = ("p0", 1)


class FakeCuda:
    """Device memory is an array that begins at address 0; the source's pool at ``SOURCE``, the target's in an
    allocation at ``TARGET``."""

    SOURCE, TARGET, HANDLE = 0, 1 << 40, b"h" * HANDLE_BYTES

    def __init__(self, source: Pool, target: Pool) -> None:
        self._source, self._target = source.reshape(-1), target.reshape(-1)
        self._queue: list[tuple[int, int, int] | int] = []  # copies, and events by number
        self._num_events, self._over = 0, 0
        self.mapped = 0
        self.hangs = False

    def share(self, pointer: int) -> tuple[bytes, int]:
        assert pointer == self.TARGET + BEFORE
        return self.HANDLE, BEFORE

    def map(self, handle: bytes) -> int:
        if handle != self.HANDLE:
            raise MoverError("cudaIpcOpenMemHandle: invalid argument")
        self.mapped += 1
        return self.TARGET

    def unmap(self, pointer: int) -> None:
        assert pointer == self.TARGET
        self.mapped -= 1

    def new_stream(self) -> Any:
        return "stream"

    def end_stream(self, stream: Any) -> None:
        assert stream == "stream"

    def copy(self, target: Column, source: Column, width: int, num_rows: int, stream: Any) -> None:
        assert target.pitch == source.pitch == width, "all of a row"
        places = target.address - self.TARGET - BEFORE, source.address - self.SOURCE
        self._queue.append((*places, num_rows * width))

    def record(self, stream: Any) -> Any:
        self._num_events += 1
        self._queue.append(self._num_events)
        return self._num_events

    def is_over(self, event: Any) -> bool:
        if not self.hangs and event > self._over:
            self.run_one_put()
            return False  # later, never at once
        return bool(event <= self._over)

    def run_one_put(self) -> None:
        while self._queue:
            what = self._queue.pop(0)
            if isinstance(what, int):
                self._over = what
                return
            target, source, num_bytes = what
            self._target[target : target + num_bytes] = self._source[source : source + num_bytes]


def pool_at(pointer: int) -> Any:
    """A pool on one GPU."""
    shard = (pointer, torch.device("cpu"), range(1))
    return SimpleNamespace(shape=POOL_SHAPE, rows=(1, 1), spread=1, shards=[shard])


class Pair:
    def __init__(self, stack: ExitStack) -> None:
        self.source_pool, self.pool = filled_pool(), empty_pool()
        self.cuda = FakeCuda(self.source_pool, self.pool)
        self.target = CudaIpcTarget(pool_at(FakeCuda.TARGET + BEFORE), lambda _: self.cuda)
        self.source = self.meet(self.target.address(WRITER))

    def meet(self, address: bytes) -> CudaIpcSource:
        return CudaIpcSource(address, NUM_BLOCKS, pool_at(FakeCuda.SOURCE), lambda _: self.cuda)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_blocks_and_layers_reach_their_places_when_the_stream_gets_there(pair: Pair) -> None:
    own, peers = [3, 4, 5, 20], [7, 8, 9, 0]
    pair.source.put(9, SECRET, list(zip(range(4), own, peers, strict=True)))
    pair.source.put(8, SECRET, [(5, 30, 31)], 1, 2)
    assert not pair.pool.any()
    assert (pair.source.pending(), pair.source.writing(9), pair.source.writing(8)) == (5, True, True)
    assert pair.source.poll() == []
    assert pair.source.poll() == [(9, position) for position in range(4)]
    assert (pair.source.writing(9), pair.source.writing(8)) == (False, True)
    while pair.source.pending():
        pair.source.poll()
    expected = empty_pool()
    expected[peers] = pair.source_pool[own]
    expected[31, 1:3] = pair.source_pool[30, 1:3]
    assert np.array_equal(pair.pool, expected)


@pytest.mark.parametrize("item", [(0, 0, NUM_BLOCKS), (0, NUM_BLOCKS, 0), (0, 0, -1), (0, -1, 0)])
def test_blocks_that_do_not_exist_are_an_error(pair: Pair, item: tuple[int, int, int]) -> None:
    with pytest.raises(MoverError, match="pools of"):
        pair.source.put(1, SECRET, [item])
    with pytest.raises(MoverError, match=f"blocks have {NUM_LAYERS}"):
        pair.source.put(1, SECRET, [(0, 0, 0)], NUM_LAYERS)


def test_a_copy_that_does_not_end_is_an_error_and_not_believed_to_have_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "PUT_S", -1.0)
    monkeypatch.setattr(cuda_ipc, "CLOSE_S", 0.05)
    pair.cuda.hangs = True
    pair.source.put(1, SECRET, [(0, 1, 1)])
    with pytest.raises(MoverError, match="in time"):
        pair.source.poll()
    with pytest.raises(MoverError, match="started anew"):
        pair.source.close()


def test_closing_waits_for_what_is_under_way(pair: Pair) -> None:
    pair.source.put(1, SECRET, [(0, 1, 1)])
    pair.source.close()
    assert np.array_equal(pair.pool[1], pair.source_pool[1])
    assert pair.cuda.mapped == 0


def test_closing_waits_for_copies_of_a_put_that_raised_in_its_middle(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer took the writing to have stopped, and they landed later."""

    def fail(stream: Any) -> Any:
        raise MoverError("cudaEventCreateWithFlags: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(pair.cuda, "record", fail)
        with pytest.raises(MoverError, match="out of memory"):
            pair.source.put(1, SECRET, [(0, 1, 1)])
    pair.source.close()
    assert np.array_equal(pair.pool[1], pair.source_pool[1])


def test_putting_into_a_dead_process_is_an_error(pair: Pair) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        source = pair.meet(cuda_ipc._ADDRESS.pack(FakeCuda.HANDLE, BEFORE, process.pid))
        process.kill()
        process.wait(DEADLINE_S)
        with pytest.raises(MoverError, match="has ended"):
            source.put(1, SECRET, [(0, 1, 1)])
        with pytest.raises(PeerEnded):
            source.poll()
        source.close()
        with pytest.raises(PeerEnded):
            pair.meet(cuda_ipc._ADDRESS.pack(FakeCuda.HANDLE, BEFORE, process.pid))


@pytest.mark.parametrize(
    "address",
    [b"", b"x" * 10, cuda_ipc._ADDRESS.pack(b"other", 0, os.getpid()), b"\xff" * cuda_ipc._ADDRESS.size],
    ids=["empty", "short", "other", "no-number-of-a-process"],
)
def test_an_address_that_is_none_is_an_error(pair: Pair, address: bytes) -> None:
    with pytest.raises(MoverError):
        pair.meet(address)


def test_it_is_for_gpus() -> None:
    with pytest.raises(MoverError, match="GPUs"):
        offered("cuda_ipc", plain_kv=False, on_gpu=False)
    assert offered("cuda_ipc", plain_kv=False, on_gpu=True) == ("cuda_ipc",)
    assert offered("auto", plain_kv=False, on_gpu=False) == ("shm", "tcp")


def test_auto_tries_movers_that_leave_blocks_on_the_device_first() -> None:
    assert offered("auto", plain_kv=False, on_gpu=True) == ("cuda_ipc", "tcp")
    assert offered("auto", plain_kv=True, on_gpu=True)[:2] == ("cuda_ipc", "nccl")


def test_shm_is_for_host_memory_and_auto_takes_nixl_beside_adapters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(MoverError, match="host memory"):
        offered("shm", plain_kv=False, on_gpu=True)
    monkeypatch.setattr(nixl, "is_installed", lambda: True)
    monkeypatch.setattr(opening, "_ADAPTERS", tmp_path)
    assert "nixl" not in offered("auto", plain_kv=True, on_gpu=False)
    (tmp_path / "mlx5_0").touch()
    assert "nixl" in offered("auto", plain_kv=True, on_gpu=False)
    assert "nixl" not in offered("auto", plain_kv=False, on_gpu=False)


def test_memory_that_cuda_cannot_share_ends_no_start_but_a_forced_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise MoverError("cudaIpcGetMemHandle: invalid argument")

    monkeypatch.setattr(opening, "LoadedCudart", refuse)
    monkeypatch.setattr(opening, "TcpTarget", lambda *_: SimpleNamespace(data_address=lambda _: "", fd=None))
    monkeypatch.setattr(opening, "gpu_of", lambda _: "a")
    pool = pool_at(0)

    def targets(*movers: str) -> MoverTargets:
        return opening.open_targets(movers, pool, None, "tcp://127.0.0.1:*", "127.0.0.1", False)

    assert targets("cuda_ipc", "tcp").endpoints.movers == ("tcp",)
    assert "goes on without the mover cuda_ipc: cudaIpcGetMemHandle: invalid argument" in caplog.text
    with pytest.raises(MoverError, match="cudaIpcGetMemHandle"):
        targets("cuda_ipc")
