"""The self-test of a mover at the first meeting: a block is put and verified before any prompt is offered."""

from __future__ import annotations

import pytest
from support.handoff_pair import DECODE, MODEL, PREFILL, TIMES, Pair, spec, whole

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.transport.handoff import protocol as act
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.messages.messages import Ack, Grant, Handoff, Meet, Message, Offer

NUM_OWN = 8


class TestingPair(Pair):
    """Its sender tests each mover with a block of ``own``. ``actions``: the test's, as they came."""

    __test__ = False

    def __init__(self, movers: tuple[str, ...] = ("shm", "tcp"), num_own: int = NUM_OWN) -> None:
        super().__init__(movers)
        self.own = BlockManager(num_own)
        meet = Meet(worker_id="p", incarnation=1, host="h", pid=5, model=MODEL, movers=movers)
        self.sender = HandoffSender(meet, TIMES, test_blocks=self.own)
        self.actions: list[act.SenderAction] = []
        take = self.sender.take

        def noted() -> list[act.SenderAction]:
            actions = take()
            kinds = (act.OpenMover, act.CloseMover, act.WriteTestBlock)
            self.actions += [action for action in actions if isinstance(action, kinds)]
            return actions

        self.sender.take = noted  # type: ignore[method-assign]

    @property
    def is_clean(self) -> bool:
        return self.own.num_used == 0 and self.pool.num_used == 0 and not self.sender.tests.running


@pytest.fixture
def pair() -> TestingPair:
    return TestingPair()


def test_a_prompt_is_offered_once_the_mover_has_passed(pair: TestingPair) -> None:
    offers: list[Offer] = []

    def note(message: Message) -> bool:
        if isinstance(message, Offer):
            offers.append(message)
            assert message.is_test or pair.sender.tests.running == {}
        return False

    prompt = spec()
    pair.offer(prompt)
    pair.deliver(note)
    assert [offer.is_test for offer in offers] == [True, False]
    assert pair.checked == [0]
    assert pair.own.num_used == 0
    assert [type(action) for action in pair.actions] == [act.OpenMover, act.WriteTestBlock]
    pair.compute(prompt)
    pair.deliver()
    assert [join.handoff.spec for join in pair.joined] == [prompt]
    second = spec(dispatch=2, request_id="q")
    pair.offer(second)
    pair.deliver(note)
    assert [offer.is_test for offer in offers] == [True, False, False]


def test_a_mover_whose_copy_is_wrong_is_left_out_and_the_prompt_goes_by_the_next(pair: TestingPair) -> None:
    pair.corrupt = [{0}, {0}]  # of the test, and of its repetition
    prompt = spec()
    pair.offer(prompt)
    pair.deliver()
    pair.compute(prompt)
    assert pair.opened == ["shm"]
    pair.tick(0.05)
    pair.deliver()
    assert pair.opened == ["shm", "tcp"]
    assert [join.handoff.spec for join in pair.joined] == [prompt]
    assert [type(ended) for ended in pair.ended] == [act.Delivered]
    second = [action for action in pair.actions if isinstance(action, act.OpenMover)][1]
    assert second.left_out == "the mover shm to d failed its self-test (1 KV blocks arrived corrupt twice)"
    assert pair.sender.num_fallbacks == 1
    pair.receiver.cancel((7, 1))
    assert pair.own.num_used == 0


def test_a_mover_that_is_forced_is_an_error(pair: TestingPair) -> None:
    pair = TestingPair(("shm",))
    pair.corrupt = [{0}, {0}]
    pair.offer(spec())
    pair.deliver()
    pair.tick(0.05)
    pair.deliver()
    assert pair.opened == ["shm"]
    (ended,) = pair.ended
    assert isinstance(ended, act.Undelivered)
    assert ended.message == (
        "the mover shm to d failed its self-test (1 KV blocks arrived corrupt twice); no other is used, for "
        "--mover allows only this one: auto allows all"
    )
    closed = [action.error for action in pair.actions if isinstance(action, act.CloseMover)]
    assert closed == [ended.message]
    assert pair.is_clean


def test_a_test_that_does_not_end_has_failed(pair: TestingPair) -> None:
    pair.offer(spec())
    pair.deliver(lambda message: isinstance(message, Ack))
    assert len(pair.sender.tests.running) == 1
    for _ in range(6):
        pair.tick(1.0)
        pair.deliver(lambda message: isinstance(message, Ack) and pair.opened == ["shm"])
    assert pair.opened == ["shm", "tcp"]
    assert pair.own.num_used == 0


def test_a_failed_test_lets_go_of_the_peers_block() -> None:
    pair = TestingPair(("shm",))
    pair.offer(spec())
    pair.deliver(lambda message: isinstance(message, Handoff))
    assert pair.pool.num_used == 1
    pair.sender.test_failed(DECODE, "broken by a test")
    pair.deliver()
    assert pair.is_clean


@pytest.mark.parametrize("reason", ["its mover", "the peer"])
def test_a_peer_that_is_gone_in_its_test_leaves_nothing_behind(pair: TestingPair, reason: str) -> None:
    pair.offer(spec())
    pair.deliver(lambda message: isinstance(message, Grant))
    assert pair.own.num_used == pair.pool.num_used == 1
    if reason == "its mover":
        pair.sender.test_failed(DECODE, "broken by a test")
    else:
        pair.sender.peer_lost(DECODE, "it has ended")
    assert pair.own.num_used == 1  # actions that read it may be under way
    pair.receiver.writer_gone(PREFILL)
    pair.collect()
    assert pair.own.num_used == pair.pool.num_used == 0


def test_a_role_that_ends_in_a_test_frees_its_block(pair: TestingPair) -> None:
    pair.offer(spec())
    pair.deliver(lambda message: isinstance(message, Grant))
    pair.sender.retire()
    pair.collect()
    assert pair.own.num_used == 0
    for _ in range(5):  # its lease expires, and is released when the receiver asks
        pair.tick(1.0)
        pair.deliver()
    assert pair.is_clean


def test_a_test_waits_for_room_and_comes_before_prompts(pair: TestingPair) -> None:
    held = pair.pool.allocate(pair.pool.num_blocks)
    assert held is not None
    pair.offer(spec())
    pair.deliver()
    assert pair.checked == []
    pair.pool.release(held)
    pair.tick(0.05)
    pair.deliver()
    assert pair.checked == [0]


def test_without_a_free_block_the_mover_is_used_untested() -> None:
    pair = TestingPair(num_own=1)
    assert pair.own.allocate(1) == [0]
    pair.offer(spec())
    pair.compute(spec())
    pair.deliver()
    assert len(pair.joined) == 1
    assert not any(isinstance(action, act.WriteTestBlock) for action in pair.actions)


def test_a_process_that_hands_to_itself_keeps_its_last_block_for_the_prompt() -> None:
    """Both ends of a test would need one, of the same pool."""
    pair = TestingPair()
    meet = Meet(worker_id="p", incarnation=1, host="h", pid=5, model=MODEL, movers=("shm", "tcp"))
    pair.sender = HandoffSender(meet, TIMES, test_blocks=pair.pool)
    assert pair.pool.allocate(pair.pool.num_blocks - 1) is not None
    whole(pair, spec(num_tokens=3))
    assert len(pair.joined) == 1
