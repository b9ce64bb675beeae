"""A process of both roles hands what it computes to itself: once it is computed, and of its full blocks none
moves."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.receivers import receiver

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import StepOutput
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    Meet,
    Message,
    ModelIdentity,
    Offer,
    Peer,
    Prefill,
    RequestFailed,
    RequestSpec,
    SamplingParams,
    u32,
    u64,
)

BLOCK = 4
MODEL = ModelIdentity(kv_name="m", dtype="float32", block_size=BLOCK, cache_map=states(1, 64), block_bytes=64)
MEET = Meet(worker_id="w:prefill", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
PREFILL, DECODE = ("w:prefill", 1), ("w:decode", 2)


class Process:
    """A prefill core and the receiving half of a decode core over one block manager; messages between them
    arrive at once."""

    def __init__(self, num_blocks: int = 16, for_decode: int = 0) -> None:
        self.blocks = BlockManager(num_blocks)
        scheduler = PrefillScheduler(self.blocks, BLOCK, "m", 8, 4, for_decode=lambda: for_decode)
        self.prefill = PrefillCore(
            MEET,
            scheduler,
            receiver(MEET, self.blocks),
            frozenset(),
            64,
            is_local=lambda name: name == "w:decode",
        )
        self.decode = receiver(replace(MEET, worker_id=DECODE[0], incarnation=DECODE[1]), self.blocks)
        self.offers: list[Offer] = []
        self.puts: list[int] = []  # positions
        self.joined: list[act.Join] = []
        self.sent: list[Message] = []  # to the coordinator

    def ask(self, dispatch: int, num_tokens: int) -> None:
        spec = RequestSpec(
            request_id=f"r{dispatch}",
            epoch=0,
            dispatch=dispatch,
            coordinator=7,
            token_ids=u32([dispatch * 50 + i for i in range(num_tokens)]),
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=9),
            deadline_s=60.0,
        )
        self.prefill.from_coordinator(
            Prefill(spec=spec, decode=Peer(worker_id=DECODE[0], incarnation=DECODE[1], address="x")), 0.0
        )

    def step(self) -> bool:
        """Whether there was one."""
        step = self.prefill.schedule(0.0)
        self.settle()
        if step is not None:
            self.prefill.complete(step, StepOutput(np.zeros(len(step.chunks), np.int32)), 0.0)
            self.settle()
        return step is not None

    def settle(self) -> None:
        while actions := self.prefill.take(0.0):
            for action in actions:
                self._carry_out(action)
            self.prefill.tick(0.0)
            for received in self.decode.take():
                self._carry_out_there(received)

    def _carry_out(self, action: object) -> None:
        if isinstance(action, act.ToCoordinator):
            self.sent.append(action.message)
        elif isinstance(action, act.ToPeer):
            self.offers += [action.message] if isinstance(action.message, Offer) else []
            self.decode.receive(PREFILL, action.message, 0.0)
        elif isinstance(action, act.Put):
            self.puts += [position for position, _, _ in action.items]
            for position, _, _ in action.items:
                self.decode.arrived(action.lease, position)
        elif isinstance(action, act.SendHandoff):
            self.decode.receive(PREFILL, action.message(u64(action.source_blocks), 0.0), 0.0)

    def _carry_out_there(self, received: object) -> None:
        if isinstance(received, act.ToPeer):
            self.prefill.sender.receive(DECODE, received.message, 0.0)
        elif isinstance(received, act.Verify):
            self.decode.verified(received.lease, received.positions, [], 0.0)
        elif isinstance(received, act.Join):
            self.joined.append(received)


@pytest.mark.parametrize(("num_tokens", "moved"), [(8, []), (18, [4]), (3, [0])])
def test_only_the_last_partial_block_moves(num_tokens: int, moved: list[int]) -> None:
    process = Process()
    process.ask(1, num_tokens)
    while process.step():
        assert len(process.offers) == process.prefill.load().counters["output_tokens"], (
            "offered with its first token, not before"
        )
    (join,) = process.joined
    assert process.puts == moved
    assert join.num_cached_blocks == num_tokens // BLOCK
    assert process.blocks.num_used == len(join.blocks) == -(-num_tokens // BLOCK), (
        "once, and the decode worker's"
    )


def test_a_prompt_leaves_blocks_to_those_that_generate() -> None:
    """Else prompts could fill the cache, each of them waiting for one more block in order to leave it."""
    process = Process(num_blocks=8, for_decode=2)
    process.ask(1, 4 * 6)
    assert not process.step(), "six, one of its own for the decode worker, and two to grow into"
    process.ask(2, 4 * 4)
    while process.step():
        pass
    assert [join.key[1] for join in process.joined] == [2]


@pytest.mark.parametrize("num_tokens", [4 * 7, 4 * 7 - 1, 4 * 6 + 1])
def test_alone_a_prompt_may_take_all_blocks_but_one(num_tokens: int) -> None:
    """A coordinator sends a process of both roles no longer one."""
    process = Process(num_blocks=8)
    process.ask(1, num_tokens)
    while process.step():
        pass
    assert [join.key[1] for join in process.joined] == [1]


def test_what_was_begun_is_given_back_when_the_process_leaves() -> None:
    """The decode worker that it is for leaves too."""
    process = Process()
    process.ask(1, 18)
    process.step()
    process.prefill.drain(0.0)
    process.settle()
    (failed,) = [message for message in process.sent if isinstance(message, RequestFailed)]
    assert (failed.dispatch, failed.kind) == (1, "preempted")
    assert process.blocks.num_used == 0
    assert process.prefill.may_leave
