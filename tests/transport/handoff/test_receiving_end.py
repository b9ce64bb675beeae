"""What the receiving end's shell does in one turn of a worker's loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import cast

import numpy as np
import pytest
import zmq

from splitserve.transport.handoff import receiving_end
from splitserve.transport.handoff.protocol import Verify
from splitserve.transport.handoff.receiving_end import ReceivingCore, ReceivingEnd
from splitserve.transport.live_environment import live_environment
from splitserve.transport.movers.block_memory import DevicePool
from splitserve.transport.movers.checksum import checksums
from splitserve.transport.movers.interface import MoverEndpoints, Pool
from splitserve.transport.movers.targets import MoverTargets

NUM_BLOCKS = 40
LEASE = 1


class Gpu:
    """Blocks on a device, which sums them in a call of its own."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self.calls = pool, list[list[int]]()

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        self.calls.append(list(blocks))
        return checksums(self._pool, blocks)


class Blocks:
    def __init__(self) -> None:
        self.pool: Pool = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, 2, 256), np.uint8)
        self.gpu, self.stored = Gpu(self.pool), list[int]()

    @property
    def device_blocks(self) -> DevicePool:
        return cast(DevicePool, self.gpu)

    def fetch(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int | None = None) -> None: ...

    def store(self, blocks: Sequence[int]) -> None:
        self.stored += blocks


class Core:
    """Of one lease. Notes what was verified."""

    def __init__(self, mover: str) -> None:
        self._mover, self.right, self.wrong = mover, list[int](), list[int]()
        self.receiver = self.leases = self

    def mover_of(self, lease: int) -> str:
        return self._mover

    def verified(self, lease: int, positions: list[int], wrong: list[int], now: float) -> None:
        self.right += [position for position in positions if position not in wrong]
        self.wrong += wrong


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def end_of(blocks: Blocks, stack: ExitStack) -> ReceivingEnd:
    """A CPU checks two blocks a turn."""
    environment = live_environment(blocks, None, zmq.Poller(), True)
    targets = MoverTargets({}, MoverEndpoints((), "h"))
    end = ReceivingEnd(environment, targets, "tcp://127.0.0.1:*", "127.0.0.1", 2 * 512)
    stack.callback(end.close)
    return end


def verify(blocks: Blocks, end: ReceivingEnd, positions: Sequence[int], corrupt: int = -1) -> None:
    sums = checksums(blocks.pool, positions)
    given = [value ^ (position == corrupt) for position, value in zip(positions, sums, strict=True)]
    end.carry_out(Verify(LEASE, list(positions), list(positions), given))


def test_a_gpu_checks_all_blocks_of_a_handoff_in_one_call(blocks: Blocks, stack: ExitStack) -> None:
    end, core = end_of(blocks, stack), Core("cuda_ipc")
    verify(blocks, end, range(NUM_BLOCKS), corrupt=7)
    end.check(cast(ReceivingCore, core), 0.0)
    assert blocks.gpu.calls == [list(range(NUM_BLOCKS))]
    assert core.wrong == [7]
    assert core.right == [position for position in range(NUM_BLOCKS) if position != 7]
    assert not end.has_checks
    assert not blocks.stored


def test_what_a_gpu_checks_in_one_turn_is_bounded(
    blocks: Blocks, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving_end, "DEVICE_CHECK_BYTES", 30 * 512)
    end, core = end_of(blocks, stack), Core("nccl")
    verify(blocks, end, range(20))
    verify(blocks, end, range(20, NUM_BLOCKS))
    end.check(cast(ReceivingCore, core), 0.0)
    assert [len(call) for call in blocks.gpu.calls] == [20, 10]
    end.check(cast(ReceivingCore, core), 0.0)
    assert core.right == list(range(NUM_BLOCKS))


def test_a_cpu_checks_a_few_blocks_a_turn(blocks: Blocks, stack: ExitStack) -> None:
    end, core = end_of(blocks, stack), Core("shm")
    verify(blocks, end, range(5))
    for checked in (2, 4, 5):
        end.check(cast(ReceivingCore, core), 0.0)
        assert len(core.right) == checked
    assert not blocks.gpu.calls
    assert blocks.stored == list(range(5))
