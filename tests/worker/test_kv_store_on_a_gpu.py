"""The KV store over a pool on a GPU, which is played."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support.played_gpu import OnGpu, played_gpu

from splitserve.bench.kernels import triton_interpreter

triton_interpreter.install()

from splitserve.engine.cache.device_blocks import DeviceBlocks  # noqa: E402
from splitserve.transport.handoff.protocol import Key  # noqa: E402
from splitserve.transport.messages.cache_map import states  # noqa: E402
from splitserve.transport.messages.messages import ModelIdentity  # noqa: E402
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
def test_blocks_come_back_and_no_copy_waits_for_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run on the default stream: the loop would stand still behind them."""
    streams: list[object] = [None]

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    pool = np.random.default_rng(1).integers(0, 255, (4, 2, 512), np.uint8)
    behind_steps: list[str] = []
    with played_gpu(monkeypatch) as gpu:
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(gpu, "_wait", lambda name: streams[-1] or behind_steps.append(name))
        woken, reader = threading.Event(), Reader()
        device = DeviceBlocks(torch.from_numpy(pool).as_subclass(OnGpu))
        store = KVStore(tmp_path, 1 << 30, b"s", MODEL, device, woken.set)
        hashes = [bytes([i]) * 16 for i in range(2)]
        store.write(hashes, [0, 1])
        store._writer.submit(lambda: None).result(20)
        store.read((7, 1), hashes)
        while not reader.is_over:
            assert woken.wait(20)
            woken.clear()
            store.report(reader)
        store.close()
    assert pool[2:].tolist() == pool[:2].tolist()
    assert behind_steps == []
