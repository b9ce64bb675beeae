"""A prefill worker whose cache is full of blocks that no decode worker takes in reports it, and the
coordinator waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace
from support.lifecycle_bench import MODEL, Bench, sent
from support.receivers import receiver

from splitserve.coordinator.lifecycle.actions import Action
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import StepOutput
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.messages import Meet, Message, Placed, Prefill, u64

BLOCK, NUM_BLOCKS = MODEL.block_size, 32
PROMPT_TOKENS = 4 * BLOCK
NUM_THAT_FIT = NUM_BLOCKS * BLOCK // PROMPT_TOKENS
NUM_PROMPTS = NUM_THAT_FIT + 3


class Rig:
    """The coordinator's core, a prefill worker's, and the receiving end of a decode worker that reads nothing
    until it ``wakes``."""

    def __init__(self) -> None:
        self.bench = Bench(max_num_seqs=64)
        self.bench.load("d", [], blocks_free=1000)
        meet = Meet(worker_id="p", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
        scheduler = PrefillScheduler(BlockManager(NUM_BLOCKS), BLOCK, "m", 16, 4)
        self.prefill = PrefillCore(meet, scheduler, receiver(meet, scheduler.blocks), frozenset(), 100)
        self.decode = receiver(replace(meet, worker_id="d"), BlockManager(1000), lambda: (64, 0))
        self.unheard: list[act.SenderAction] = []  # messages and blocks on their way to the decode worker
        self.num_dispatched = 0

    def submit(self, number: int) -> None:
        self._obey(self.bench.submit(f"r{number}", prompt_token_ids=[number] * PROMPT_TOKENS))

    def work(self) -> None:
        """The prefill worker computes all that it has, and sends its reports to the coordinator."""
        while (step := self.prefill.schedule(0.0)) is not None:
            self.prefill.complete(step, StepOutput(np.full(step.batch.num_seqs, 5, np.int32)), 0.0)
            self.report()
        self.report()

    def report(self) -> None:
        """What has happened, then a heartbeat."""
        text: list[Message] = []
        for action in self.prefill.take(0.0):
            if isinstance(action, act.ToCoordinator):
                text.append(action.message)
            elif not isinstance(action, act.Delivered):
                self.unheard.append(action)  # type: ignore[arg-type]
        for message in [*text, self.prefill.load()]:
            self._obey(self.bench.send("p", message))

    def wake(self) -> None:
        """The decode worker reads all messages, and takes in the blocks."""
        while self.unheard:
            unheard, self.unheard = self.unheard, []
            for action in unheard:
                self._to_decode(action)
            while actions := self.decode.take():
                for answer in actions:
                    self._from_decode(answer)
            self.report()

    def _obey(self, actions: list[Action]) -> None:
        for prefill in sent(actions, Prefill):
            self.num_dispatched += 1
            self.prefill.from_coordinator(prefill, 0.0)

    def _to_decode(self, action: act.SenderAction) -> None:
        match action:
            case act.ToPeer():
                self.decode.receive(("p", 1), action.message, 0.0)
            case act.Put():
                for position, _, _ in action.items:
                    self.decode.arrived(action.lease, position)
            case act.SendPlaced():
                placed = Placed(lease=action.lease, first=action.first, checksums=u64(action.source_blocks))
                self.decode.receive(("p", 1), placed, 0.0)
            case act.SendHandoff():
                self.decode.receive(("p", 1), action.message(u64(action.source_blocks), 0.0), 0.0)

    def _from_decode(self, action: Any) -> None:
        match action:
            case act.ToPeer():
                self.prefill.sender.receive(("d", 1), action.message, 0.0)
            case act.Verify():
                self.decode.verified(action.lease, action.positions, [], 0.0)


def test_a_cache_full_of_unsent_blocks_takes_no_prompt_until_they_are_taken_in() -> None:
    rig = Rig()
    for number in range(NUM_PROMPTS):
        rig.submit(number)
        rig.work()
    load = rig.prefill.load()
    assert (load.accepting, load.blocks_used, load.num_running, load.num_waiting) == (False, NUM_BLOCKS, 0, 0)
    assert rig.num_dispatched == NUM_THAT_FIT, "the rest waits at the coordinator"
    assert len(rig.bench.core.queue) == NUM_PROMPTS - NUM_THAT_FIT
    rig.wake()
    assert rig.prefill.load().accepting
    rig.work()
    assert (rig.num_dispatched, len(rig.bench.core.queue)) == (NUM_PROMPTS, 0)
    rig.wake()
    assert rig.prefill.blocks.num_used == 0
