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
from splitserve.transport.movers.block_memory import BlockPool, DevicePool
from splitserve.transport.movers.checksum import checksums
from splitserve.transport.movers.interface import MoverEndpoints, Pool
from splitserve.transport.movers.targets import MoverTargets

NUM_BLOCKS = 40
LEASE = 1


class Gpu:
    """Blocks on a device, which sums them in a call of its own."""

    def __init__(self) -> None:
        self.pool: Pool = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, 2, 256), np.uint8)
        self.shape, self.calls = self.pool.shape, list[list[int]]()

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        self.calls.append(list(blocks))
        return checksums(self.pool, blocks)


class Core:
    """The core of one lease: notes the positions that were verified."""

    def __init__(self) -> None:
        self.right, self.wrong = list[int](), list[int]()
        self.receiver = self

    def verified(self, lease: int, positions: list[int], wrong: list[int], now: float) -> None:
        self.right += [position for position in positions if position not in wrong]
        self.wrong += wrong


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def end_of(pool: BlockPool, stack: ExitStack) -> ReceivingEnd:
    """A CPU checks two blocks a turn."""
    environment = live_environment(pool, None, zmq.Poller(), True)
    targets = MoverTargets({}, MoverEndpoints((), "h"))
    end = ReceivingEnd(environment, targets, "tcp://127.0.0.1:*", "127.0.0.1", 2 * 512)
    stack.callback(end.close)
    return end


def verify(gpu: Gpu, end: ReceivingEnd, positions: Sequence[int], corrupt: int = -1) -> None:
    sums = checksums(gpu.pool, positions)
    given = [value ^ (position == corrupt) for position, value in zip(positions, sums, strict=True)]
    end.carry_out(Verify(LEASE, list(positions), list(positions), given))


def test_a_gpu_checks_all_blocks_of_a_handoff_in_one_call(gpu: Gpu, stack: ExitStack) -> None:
    end, core = end_of(cast(DevicePool, gpu), stack), Core()
    verify(gpu, end, range(NUM_BLOCKS), corrupt=7)
    end.check(cast(ReceivingCore, core), 0.0)
    assert gpu.calls == [list(range(NUM_BLOCKS))]
    assert core.wrong == [7]
    assert core.right == [position for position in range(NUM_BLOCKS) if position != 7]
    assert not end.has_checks


def test_what_a_gpu_checks_in_one_turn_is_bounded(
    gpu: Gpu, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving_end, "DEVICE_CHECK_BYTES", 30 * 512)
    end, core = end_of(cast(DevicePool, gpu), stack), Core()
    verify(gpu, end, range(20))
    verify(gpu, end, range(20, NUM_BLOCKS))
    end.check(cast(ReceivingCore, core), 0.0)
    assert [len(call) for call in gpu.calls] == [20, 10]
    end.check(cast(ReceivingCore, core), 0.0)
    assert core.right == list(range(NUM_BLOCKS))


def test_a_cpu_checks_a_few_blocks_a_turn(gpu: Gpu, stack: ExitStack) -> None:
    end, core = end_of(gpu.pool, stack), Core()
    verify(gpu, end, range(5))
    for checked in (2, 4, 5):
        end.check(cast(ReceivingCore, core), 0.0)
        assert len(core.right) == checked
    assert not gpu.calls
