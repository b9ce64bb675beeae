"""The mover tcp between pools on GPUs, which are played: blocks pass through a bounded piece of page-locked
memory, whole and to no other place, also when they are cancelled or their lease ends on the way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.kv_pools import NUM_BLOCKS, SECRET, empty_pool, filled_pool, until
from support.played_gpu import OnGpu, PlayedGpu, played_gpu

from splitserve.bench.kernels import triton_interpreter

triton_interpreter.install()

from splitserve.engine.cache.device_blocks import DeviceBlocks  # noqa: E402
from splitserve.transport.errors import MoverError  # noqa: E402
from splitserve.transport.live_environment import LiveDevice  # noqa: E402
from splitserve.transport.movers.block_memory import Staging  # noqa: E402
from splitserve.transport.movers.checksum import checksums  # noqa: E402
from splitserve.transport.movers.interface import Arrival, Pool  # noqa: E402
from splitserve.transport.movers.opening import offered  # noqa: E402
from splitserve.transport.movers.tcp import inbound, source, target, wire  # noqa: E402
from splitserve.transport.movers.tcp.source import TcpSource  # noqa: E402
from splitserve.transport.movers.tcp.target import TcpTarget  # noqa: E402
from splitserve.transport.movers.tcp.wire import GCM, OCB, PLAIN  # noqa: E402

RECORD_BYTES = 100  # a block is cut in the middle of a layer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedGpu]:
    for module in (wire, source, inbound, target):
        monkeypatch.setattr(module, "RECORD_BYTES", RECORD_BYTES)
    with played_gpu(monkeypatch) as gpu:
        gpu.beside_steps = True
        yield gpu


def on_gpu(pool: Pool) -> DeviceBlocks:
    return DeviceBlocks(torch.from_numpy(pool).as_subclass(OnGpu))


class Pair:
    """Both ends in this process. ``pool``: what lies in the target's memory."""

    def __init__(self, mode: int = PLAIN) -> None:
        self.source_pool, self.pool = filled_pool(), empty_pool()
        self.target = TcpTarget("tcp://127.0.0.1:*", on_gpu(self.pool), takes_plain=True)
        self.source = TcpSource(
            self.target.data_address("127.0.0.1"), on_gpu(self.source_pool), mode == PLAIN, mode or None
        )
        self.arrived: list[Arrival] = []

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()
        self.target.close_all()

    def has(self, *arrivals: Arrival) -> bool:
        self.source.poll()
        self.arrived += self.target.poll(100)
        return set(arrivals) <= set(self.arrived)


@pytest.mark.parametrize("mode", [PLAIN, GCM, OCB])
def test_blocks_and_layers_reach_their_places_on_the_gpu(gpu: PlayedGpu, mode: int) -> None:
    with Pair(mode) as pair:
        pair.target.open(1, SECRET, {0: 7, 1: 3, 2: 11})
        pair.source.put(1, SECRET, [(0, 4, 7), (1, 5, 3)])
        pair.source.put(1, SECRET, [(2, 9, 11)], 0, 2)
        pair.source.put(1, SECRET, [(2, 9, 11)], 2)
        until(lambda: pair.has((1, 0), (1, 1), (1, 2)))
        expected = empty_pool()
        expected[[7, 3, 11]] = pair.source_pool[[4, 5, 9]]
        assert np.array_equal(pair.pool, expected)
        assert not pair.target.dropped
        assert set(gpu.waits) == {"tensor"}, (
            "all but the numbers of blocks is copied by way of page-locked memory"
        )


def test_no_more_is_page_locked_than_a_record_for_each_connection(gpu: PlayedGpu) -> None:
    with Pair() as pair:
        for lease in range(1, 4):
            pair.target.open(lease, SECRET, {i: i for i in range(4)})
            pair.source.put(lease, SECRET, [(i, i, i) for i in range(4)])
        until(lambda: pair.has(*((3, i) for i in range(4))))
        connections = len(pair.source._connections) + 1
    assert 0 < gpu.num_page_locked_bytes <= connections * RECORD_BYTES


def test_a_lease_that_ends_on_the_way_is_written_no_more(gpu: PlayedGpu) -> None:
    with Pair() as pair:
        pair.target.open(1, SECRET, {0: 7})
        pair.target.close(1)
        pair.source.put(1, SECRET, [(0, 4, 7)])
        pair.target.open(2, SECRET, {0: 8})
        pair.source.put(2, SECRET, [(0, 5, 8)])
        until(lambda: pair.has((2, 0)))
        expected = empty_pool()
        expected[8] = pair.source_pool[5]
        assert np.array_equal(pair.pool, expected)


@pytest.mark.parametrize("mode", [PLAIN, GCM])
def test_a_lease_that_ends_within_a_parcel_is_not_written_and_is_written_with_its_lock_held(
    gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    write, unpack = Staging.write, DeviceBlocks.unpack
    with Pair(mode) as pair:

        def end_the_lease(*arguments: Any) -> None:
            pair.target.close(1)
            write(*arguments)

        def unpack_locked(*arguments: Any) -> None:
            assert pair.target._lock._is_owned()  # type: ignore[attr-defined]
            unpack(*arguments)

        monkeypatch.setattr(Staging, "write", end_the_lease)
        monkeypatch.setattr(DeviceBlocks, "unpack", unpack_locked)
        pair.target.open(1, SECRET, {0: 7, 1: 8})
        pair.target.open(2, SECRET, {0: 9})
        pair.source.put(1, SECRET, [(0, 4, 7), (1, 5, 8)])
        pair.source.put(2, SECRET, [(0, 6, 9)])
        until(lambda: pair.has((2, 0)))
        expected = empty_pool()
        expected[9] = pair.source_pool[6]
        assert np.array_equal(pair.pool, expected)


def test_a_peer_that_dies_on_the_way_costs_its_puts_and_leaves_no_page_locked_memory(
    gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "RETRY_S", 0.1)
    records: list[weakref.ref[Staging]] = []
    copy = Staging._copy

    def noted(self: Staging, *arguments: Any, **options: Any) -> int:
        if not any(record() is self for record in records):
            records.append(weakref.ref(self))
        return copy(self, *arguments, **options)

    monkeypatch.setattr(Staging, "_copy", noted)
    send_to_a_peer_that_dies()
    assert len(records) >= 2, "of both ends"
    gc.collect()
    assert [record() for record in records if record() is not None] == []


def send_to_a_peer_that_dies() -> None:
    pair = Pair()
    pair.target.open(1, SECRET, {i: i for i in range(NUM_BLOCKS)})
    pair.source.put(1, SECRET, [(0, 0, 0)])
    until(lambda: pair.has((1, 0)))
    pair.target.close_all()
    pair.source.put(1, SECRET, [(i, i, i) for i in range(1, NUM_BLOCKS)])
    with pytest.raises(MoverError, match="cannot reach the decode worker"):
        until(lambda: pair.source.poll() and False)
    pair.source.cancel(1)
    pair.source.close()
    for connection in pair.source._connections:
        connection.join()


def test_a_gpu_that_copies_no_more_ends_the_mover_and_not_the_worker(
    gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Staging, *_: object) -> memoryview:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Staging, "read", fails)
    with Pair() as pair:
        pair.target.open(1, SECRET, {0: 7})
        pair.source.put(1, SECRET, [(0, 4, 7)])
        with pytest.raises(MoverError, match="illegal memory access"):
            until(lambda: pair.source.poll() and False)


def test_the_blocks_of_any_mover_are_summed_on_the_gpu(gpu: PlayedGpu) -> None:
    pool = np.random.default_rng(2).integers(0, 256, (6, 4, 512), np.uint8)
    device = LiveDevice(on_gpu(pool))
    device.add_sent([4, 2], 0, device.num_layers)
    assert device.sent_checksums([4, 2]) == device.checksums([4, 2]) == checksums(pool, [4, 2])
    assert device.block_bytes == pool[0].nbytes


def test_shared_memory_is_for_pools_in_host_memory() -> None:
    assert "shm" not in offered("auto", plain_kv=False, on_gpu=True)
    with pytest.raises(MoverError, match="choose auto, cuda_ipc or tcp"):
        offered("shm", plain_kv=False, on_gpu=True)
