"""Blocks of a GPU pool travel through host memory. (Here the pool lies on the CPU: the copies are the same.)"""

from __future__ import annotations

import torch

from splitserve.engine.host_mirror import HostMirror


def test_blocks_go_through_the_mirror_and_no_others_change() -> None:
    source, target = torch.randint(0, 255, (6, 32), dtype=torch.uint8), torch.zeros((6, 32), dtype=torch.uint8)
    memory = bytearray(target.numel())
    sending, receiving = HostMirror(source), HostMirror(target, lambda num_bytes: memoryview(memory))
    sending.fetch([4, 1])
    receiving.pool[[0, 5]] = sending.pool[[4, 1]]  # what a mover does
    receiving.store([0, 5])
    assert torch.equal(target[[0, 5]], source[[4, 1]])
    assert not target[1:5].any()
    assert any(memory)  # the mirror lies where it was told to
