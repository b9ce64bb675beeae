"""Pools on several GPUs, which are played, as one pool of logical blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splitserve.bench.kernels import triton_interpreter

triton_interpreter.install()

from support.gpu_tensors import OnGpu  # noqa: E402
from support.played_gpu import Stream, played_gpu  # noqa: E402
from support.sharded_pools import NUM_LAYERS, Shards, as_bytes, logical_pool  # noqa: E402

from splitserve.engine.cache import sharded_blocks  # noqa: E402
from splitserve.transport.live_environment import LiveDevice  # noqa: E402
from splitserve.transport.movers.block_memory import DevicePool, HostMemory  # noqa: E402
from splitserve.transport.movers.checksum import checksums  # noqa: E402

KINDS = pytest.mark.parametrize(
    ("planes", "heads", "degree", "spread"),
    [
        *((*kind, False) for kind in [(2, 4, 1), (2, 4, 2), (2, 4, 4), (2, 2, 4), (1, 1, 4), (1, 1, 2)]),
        *((1, 1, degree, True) for degree in (2, 3, 4)),
    ],
)
BLOCKS, LAYERS = [4, 1, 11, 0], [slice(0, NUM_LAYERS), slice(1, 3), slice(2, 3)]
pytestmark = pytest.mark.timeout(60)


@KINDS
def test_they_are_packed_and_unpacked_as_logical_blocks(
    planes: int, heads: int, degree: int, spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logical = logical_pool(planes, heads)
    host, expected = HostMemory(as_bytes(logical)), logical_pool(planes, heads, None)
    with played_gpu(monkeypatch) as gpu:
        source, target = (Shards(of, degree, True, spread) for of in (logical, expected.copy()))
        waited: list[int] = []
        monkeypatch.setattr(Stream, "synchronize", lambda stream: waited.append(stream.gpu))
        gpu.beside_steps = True
        pool: DevicePool = source.blocks
        assert pool.shape == as_bytes(logical).shape
        for layers in LAYERS:
            packed = pool.pack(BLOCKS, layers)
            assert type(packed) is OnGpu, "on the first GPU"
            assert packed.as_subclass(torch.Tensor).equal(host.pack(BLOCKS, layers))
            target.blocks.unpack(packed, [5, 3, 0, 7], layers)
            assert waited == 2 * [*range(degree)], "calls return when the work is done"
            waited.clear()
            expected[[5, 3, 0, 7], layers] = logical[BLOCKS, layers]
            assert target.hold(expected)
    assert source.hold(logical)


def test_heads_of_several_gpus_are_read_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    logical = logical_pool(2, 2)
    with played_gpu(monkeypatch):
        shards = Shards(logical, 4, True)
        for other in (1, 3):
            shards.parts[other].zero_()
        packed = shards.blocks.pack(BLOCKS, LAYERS[0]).as_subclass(torch.Tensor)
    assert packed.equal(HostMemory(as_bytes(logical)).pack(BLOCKS, LAYERS[0]))


@KINDS
def test_their_checksums_are_those_of_the_logical_blocks(
    planes: int, heads: int, degree: int, spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logical = logical_pool(planes, heads)
    block_bytes = as_bytes(logical)[0].nbytes
    monkeypatch.setattr(sharded_blocks, "GATHERED_BYTES", 3 * block_bytes)  # in two parts
    with played_gpu(monkeypatch):
        pool = Shards(logical, degree, True, spread).blocks
        assert pool.checksums(BLOCKS) == checksums(as_bytes(logical), BLOCKS)


@KINDS
def test_a_block_is_written_on_every_gpu_and_no_other_block_is(
    planes: int, heads: int, degree: int, spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logical = logical_pool(planes, heads)
    with played_gpu(monkeypatch):
        shards = Shards(logical, degree, True, spread)
        LiveDevice(shards.blocks).write_test_block(2, (1, 7))  # it compares the checksums
    written = as_bytes(logical.copy())
    LiveDevice(written).write_test_block(2, (1, 7))
    assert not np.array_equal(written[2], as_bytes(logical)[2])
    assert shards.hold(written.view(np.int16).reshape(logical.shape))
