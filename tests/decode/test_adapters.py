"""A sequence generates with its adapter or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.prefix_rig import HASHES, MODEL, SPEC
from support.receivers import receiver

from splitserve.decode.core import DecodeCore
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.adapters.slots import AdapterSlots
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import StepOutput
from splitserve.transport.handoff.protocol import Join, ToCoordinator
from splitserve.transport.messages.messages import (
    HASH_BYTES,
    Cancel,
    Handoff,
    Joined,
    Load,
    Meet,
    Message,
    Offer,
    RequestFailed,
    u32,
)


class Rig:
    """A decode worker with one slot, and a handoff to it that is complete, with a state of one block."""

    def __init__(self) -> None:
        self.blocks, self.slots = BlockManager(20), AdapterSlots(1)
        meet = Meet(worker_id="d", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
        scheduler = DecodeScheduler(self.blocks, MODEL.block_size, 4, 128, frozenset(), state_blocks=1)
        self.core = DecodeCore(meet, scheduler, receiver(meet, self.blocks), adapters=self.slots)

    def fill(self, content: str) -> None:
        self.slots.rename({"sql": content})
        assert self.slots.take(content) is not None
        self.slots.filled(content)

    def join(self) -> list[Message]:
        """Return what the coordinator gets."""
        blocks = self.blocks.allocate(8 + 2)
        assert blocks is not None
        handoff = Handoff(spec=replace(SPEC, adapter="x"), lease=1, token=5, checksums=b"")
        self.core._join(Join((7, 1), handoff, blocks[:9], blocks[9:], 0, 0.0, None), 0.0)
        actions = self.core.take(0.0)
        messages = [action.message for action in actions if isinstance(action, ToCoordinator)]
        return [message for message in messages if not isinstance(message, Load)]


def test_one_whose_adapter_is_not_here_is_given_back() -> None:
    rig = Rig()
    rig.fill("y")
    (failed,) = rig.join()
    assert isinstance(failed, RequestFailed)
    assert (failed.dispatch, failed.kind) == (1, "handoff_failed")
    assert failed.message == "its adapter is not on worker d any more"
    assert rig.core.schedule(0.0) is None
    assert rig.blocks.num_used == 0


def test_it_is_in_use_until_its_last_step_is_over() -> None:
    rig = Rig()
    rig.fill("x")
    (joined,) = rig.join()
    assert isinstance(joined, Joined)
    step = rig.core.schedule(0.0)
    assert step is not None
    assert step.batch.adapters == ["x"]
    rig.core.from_coordinator(Cancel(coordinator=7, dispatches=u32([1])), 0.0)
    assert rig.core.held == []
    assert rig.core.adapters.in_use == {"x"}, "the step in flight has it"
    rig.core.complete(step, StepOutput(np.array([3], np.int32)), 0.0)
    assert rig.core.adapters.in_use == set()
    assert rig.blocks.num_used == 0


def test_it_is_in_use_while_its_prompt_is_computed_elsewhere() -> None:
    """From the offer on, with blocks or without."""
    rig, prefill = Rig(), ("p", 1)
    rig.fill("x")
    meet = Meet(worker_id="p", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
    rig.core.from_peer(prefill, meet, 0.0)
    offer = Offer(
        request_id="r",
        epoch=0,
        coordinator=7,
        dispatch=1,
        num_tokens=30,
        block_hashes=b"".join(HASHES * 2)[: 7 * HASH_BYTES],
        adapter="x",
    )
    rig.core.from_peer(prefill, offer, 0.0)
    assert rig.core.adapters.in_use == {"x"}
    rig.core.from_coordinator(Cancel(coordinator=7, dispatches=u32([1])), 0.0)
    rig.core.take(0.0)
    assert rig.core.adapters.in_use == set()


@pytest.mark.parametrize("ends", [False, True])
def test_a_slot_is_given_up_once_nothing_here_uses_it(ends: bool) -> None:
    rig = Rig()
    rig.fill("x")
    rig.join()
    rig.core.block_events()
    rig.slots.rename({"sql": "y"})
    if ends:
        rig.core.from_coordinator(Cancel(coordinator=7, dispatches=u32([1])), 0.0)
    for _ in range(3):
        rig.slots.give_up(rig.core.adapters.in_use, rig.core.adapters.reported)
        rig.core.block_events()
    assert rig.slots.has("x") is not ends
    assert rig.slots.wanted() == (["y"] if ends else [])
