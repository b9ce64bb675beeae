"""Blocks of a GPU pool travel through host memory. (Here the pool lies on the CPU: the copies are the
same.)"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from splitserve.engine.cache.host_mirror import HostMirror, lock_pages


def test_blocks_go_through_the_mirror_and_no_others_change() -> None:
    source, target = (
        torch.randint(0, 255, (6, 32), dtype=torch.uint8),
        torch.zeros((6, 32), dtype=torch.uint8),
    )
    memory = bytearray(target.numel())
    sending, receiving = HostMirror(source), HostMirror(target, lambda num_bytes: memoryview(memory))
    sending.fetch([4, 1])
    receiving.pool[[0, 5]] = sending.pool[[4, 1]]  # what a mover does
    receiving.store([0, 5])
    assert torch.equal(target[[0, 5]], source[[4, 1]])
    assert not target[1:5].any()
    assert any(memory)  # the mirror lies in the given memory


@pytest.mark.parametrize("error", [0, 712])
def test_shared_memory_is_locked_for_the_gpu_or_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    asked: list[tuple[int, int, int]] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *arguments: asked.append(arguments) or error)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = torch.zeros((4, 8), dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        lock_pages(memory)
    assert asked == [(memory.data_ptr(), 32, 0)]
    assert ("copies are slower" in caplog.text) == (error != 0)
