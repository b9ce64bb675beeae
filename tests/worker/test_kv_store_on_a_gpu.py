"""The KV store over a pool on a GPU, which is played."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.gpu_tensors import ON_GPUS
from support.played_gpu import played_gpu

from splitserve.bench.kernels import triton_interpreter

triton_interpreter.install()

from splitserve.engine.cache.device_blocks import DeviceBlocks  # noqa: E402
from splitserve.engine.cache.sharded_blocks import ShardedBlocks  # noqa: E402
from splitserve.transport.handoff.protocol import Key  # noqa: E402
from splitserve.transport.messages.cache_map import states  # noqa: E402
from splitserve.transport.messages.messages import ModelIdentity  # noqa: E402
from splitserve.transport.movers.block_memory import DevicePool  # noqa: E402
from splitserve.worker.kv_folder import KVFolder  # noqa: E402
from splitserve.worker.kv_store import KVStore  # noqa: E402

MODEL = ModelIdentity(kv_name="m", dtype="f", block_size=4, cache_map=states(2, 512), block_bytes=1024)


class Reader:
    """A core that has what is read filled into blocks 2 and 3."""

    is_over = False

    def arrived(self, key: Key, count: int) -> list[int]:
        return [2, 3][:count]

    def filled(self, key: Key, count: int) -> None:
        self.is_over = True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_blocks_come_back_and_no_copy_waits_for_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    """Steps run on the default stream: the loop would stand still behind them."""
    logical = np.random.default_rng(1).integers(0, 255, (4, 2, 2, 2, 4, 32), np.uint8)
    parts = [torch.from_numpy(part.copy()) for part in np.array_split(logical, num_gpus, axis=3)]
    behind_steps: list[str] = []
    with played_gpu(monkeypatch) as gpu:
        gpu.beside_steps = True
        monkeypatch.setattr(gpu, "_wait", lambda name: gpu.streams.entered or behind_steps.append(name))
        woken, reader = threading.Event(), Reader()
        pools = [part.as_subclass(place) for part, place in zip(parts, ON_GPUS, strict=False)]
        heads = [range(2)] if num_gpus == 1 else [range(1), range(1, 2)]
        device: DevicePool = (
            DeviceBlocks(pools[0].view(4, 2, 512)) if num_gpus == 1 else ShardedBlocks(pools, heads, 2)
        )
        store = KVStore(KVFolder(tmp_path, 1 << 30), b"s", MODEL, device, woken.set)
        hashes = [bytes([i]) * 16 for i in range(2)]
        store.write(hashes, [0, 1])
        store._writer.submit(lambda: None).result(20)
        store.read((7, 1), hashes)
        while not reader.is_over:
            assert woken.wait(20)
            woken.clear()
            store.report(reader)
        store.close()
    for part in parts:
        assert part[2:].equal(part[:2])
    assert behind_steps == []
