"""Blocks on a device, as movers see them, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from xxhash import xxh3_64_intdigest

from splitserve.bench.kernels import triton_interpreter

triton_interpreter.install()

from splitserve.engine.cache.device_blocks import DeviceBlocks  # noqa: E402
from splitserve.transport.errors import MoverError  # noqa: E402
from splitserve.transport.live_environment import LiveDevice  # noqa: E402
from splitserve.transport.movers.block_memory import DevicePool, HostMemory  # noqa: E402
from splitserve.transport.movers.checksum import DeviceChecksums, checksums  # noqa: E402


def filled() -> torch.Tensor:
    return torch.randint(0, 256, (6, 4, 512), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_packed_pieces_and_checksums_are_those_of_host_memory() -> None:
    pool = filled()
    device: DevicePool = DeviceBlocks(pool)
    host = HostMemory(pool.numpy())
    blocks, layers = [4, 1, 3], slice(1, 3)
    packed = device.pack(blocks, layers)
    assert torch.equal(packed, host.pack(blocks, layers))
    assert (
        device.checksums(blocks)
        == checksums(pool.numpy(), blocks)
        == [xxh3_64_intdigest(pool[b].numpy().data) for b in blocks]
    )
    other = torch.zeros_like(pool)
    DeviceBlocks(other).unpack(packed, [0, 2, 5], layers)
    expected = torch.zeros_like(pool)
    expected[[0, 2, 5], 1:3] = pool[blocks, 1:3]
    assert torch.equal(other, expected)


def test_a_block_that_is_put_again_is_summed_again() -> None:
    pool = filled()
    sums = DeviceChecksums(DeviceBlocks(pool).checksums)
    before = sums.of([1, 2])
    pool[1] ^= 1
    assert sums.of([1, 2]) == before
    sums.add([1])
    assert sums.of([1, 2]) == [xxh3_64_intdigest(pool[1].numpy().data), before[1]]


def test_a_test_block_is_written_on_the_device_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = filled()
    before, blocks = pool.clone(), DeviceBlocks(pool)
    device = LiveDevice(blocks)
    device.write_test_block(2, (1, 7))
    first = pool[2].clone()
    assert not torch.equal(first, before[2])
    assert torch.equal(pool[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])
    device.write_test_block(2, (1, 8))
    assert not torch.equal(first, pool[2])
    monkeypatch.setattr(blocks, "checksums", lambda wanted: [0] * len(wanted))
    with pytest.raises(MoverError, match="the GPU's checksum of a block is not that of its bytes"):
        LiveDevice(blocks).write_test_block(2, (1, 9))
