"""A decode worker leaves: its sequences go on at another one, token for token, however badly messages travel.

(With KV contents and whole systems: tests/simulation.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.decode.core import DecodeCore
from splitserve.decode.rows import DecodeStep
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import SamplingState, StepOutput
from splitserve.transport.handoff import protocol as act
from splitserve.transport.handoff.receiver import HandoffReceiver
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    Cancel,
    Joined,
    Load,
    Meet,
    Message,
    ModelIdentity,
    Move,
    Peer,
    RequestFailed,
    RequestSpec,
    SamplingParams,
    StepTokens,
    TokenLogprobs,
    from_u32,
    u32,
    u64,
)
from splitserve.transport.movers.interface import MoverEndpoints

BLOCK = 4
MODEL = ModelIdentity(kv_name="m", dtype="float32", block_size=BLOCK, cache_map=states(1, 64), block_bytes=64)
PARAMS: dict[str, Any] = {
    "max_tokens": 30, "temperature": 0.0, "presence_penalty": 0.5, "seed": 7, "logprobs": 0,
}  # fmt: skip


def generate_next(tokens: list[int]) -> int:
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + 7) % 251 + 1


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(generate_next(tokens))
    return tokens[len(prompt) :]


class Worker:
    """A decode worker without a model: a row's token is a function of its sequence's tokens."""

    def __init__(self, pair: Pair, name: str, num_blocks: int) -> None:
        self.pair, self.name = pair, name
        self.blocks = BlockManager(num_blocks)
        scheduler = DecodeScheduler(self.blocks, BLOCK, 8, 128, frozenset())
        endpoints = MoverEndpoints(("tcp",), "h")
        receiver = HandoffReceiver(
            (name, 1), MODEL, self.blocks, endpoints, lambda: self.core.room(), lambda: b"s" * 16
        )
        meet = Meet(worker_id=name, incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
        self.core = DecodeCore(meet, scheduler, receiver)
        self.sent: list[Message] = []
        self.step: DecodeStep | None = None

    def begin(self) -> None:
        """A step starts..."""
        if self.step is None:
            self.step = self.core.schedule(self.pair.now)

    def end(self) -> None:
        """... and ends."""
        step, self.step = self.step, None
        if step is not None:
            states = [s.state for s in step.sequences]
            tokens = np.array(
                [generate_next([*s.prompt_token_ids, *s.output_token_ids]) for s in states], np.int32
            )
            logprobs = {row: TokenLogprobs(-float(token)) for row, token in enumerate(tokens)}
            self.core.complete(step, StepOutput(tokens, logprobs), self.pair.now)

    def act(self, lossy: Callable[[Message], int]) -> None:
        while actions := self.core.take(self.pair.now):
            for action in actions:
                self._carry_out(action, lossy)

    def _carry_out(self, action: Any, lossy: Callable[[Message], int]) -> None:
        other = self.pair.other(self)
        if isinstance(action, act.ToCoordinator):
            self.sent.append(action.message)
        elif isinstance(action, act.ToPeer):
            self._send(other, action.message, lossy)
        elif isinstance(action, act.SendHandoff):
            sums = u64(action.source_blocks)
            handoff = action.message(sums, 0.0)
            self._send(other, handoff, lossy)
        elif isinstance(action, act.Put):
            for position, _, _ in action.items:
                other.core.receiver.arrived(action.lease, position)
        elif isinstance(action, act.Verify):
            self.core.receiver.verified(action.lease, action.positions, [], self.pair.now)

    def _send(self, other: Worker, message: Message, lossy: Callable[[Message], int]) -> None:
        for _ in range(lossy(message)):
            self.pair.mail.append((self, other, message))

    def receive(self, sender: Worker, message: Message) -> None:
        moving = self.core.moving
        assert moving is not None
        if message.__class__.__name__ in ("Met", "Grant", "Refuse", "Ack", "Nack", "Revoke"):
            moving.receive((sender.name, 1), message, self.pair.now)
        else:
            self.core.from_peer((sender.name, 1), message, self.pair.now)


class Pair:
    """Two decode workers and the mail between them; one sequence runs on the first."""

    def __init__(self, num_blocks: int = 32, prompt: int = 6) -> None:
        self.now = 0.0
        self.mail: list[tuple[Worker, Worker, Message]] = []
        self.a, self.b = Worker(self, "a", num_blocks), Worker(self, "b", num_blocks)
        self.prompt = [3 + i for i in range(prompt)]
        self.want = expected(self.prompt, 30)
        blocks = self.a.blocks.allocate(-(-prompt // BLOCK))
        assert blocks is not None
        state = SamplingState(SamplingParams(**PARAMS), list(self.prompt), self.want[:1])
        self.a.core.scheduler.join((7, 1), "r", state, blocks, b"root", 500.0)

    def other(self, worker: Worker) -> Worker:
        return self.b if worker is self.a else self.a

    def order(self, tokens_known: int = 1) -> None:
        """The coordinator's order, which knows of fewer tokens than the worker."""
        spec = RequestSpec(
            request_id="r",
            epoch=1,
            dispatch=2,
            coordinator=7,
            token_ids=u32([*self.prompt, *self.want[:tokens_known]]),
            num_prompt_tokens=len(self.prompt),
            sampling=SamplingParams(**PARAMS),
            deadline_s=500.0,
        )
        self.a.core.from_coordinator(
            Move(dispatch=1, spec=spec, decode=Peer(worker_id="b", incarnation=1, address="x")), self.now
        )

    def turn(self, seconds: float = 0.05, lossy: Callable[[Message], int] = lambda m: 1) -> None:
        """One turn of both loops; the mail of the turn before arrives."""
        self.now += seconds
        mail, self.mail = self.mail, []
        for sender, receiver, message in mail:
            receiver.receive(sender, message)
        for worker in (self.a, self.b):
            worker.core.tick(self.now)
            worker.end()
            worker.act(lossy)
            worker.begin()
            worker.act(lossy)

    def tokens(self) -> dict[int, int]:
        """Return the coordinator's view: by index, from the first worker that sends it. All senders agree."""
        found = {0: self.want[0]}
        for message in (*self.a.sent, *self.b.sent):
            if isinstance(message, StepTokens):
                for index, token in zip(from_u32(message.indices), from_u32(message.tokens), strict=True):
                    assert found.setdefault(index, token) == token
            elif isinstance(message, Joined):
                assert found.setdefault(message.index, message.token) == message.token
        return found

    def joined(self) -> list[Joined]:
        return [m for m in self.b.sent if isinstance(m, Joined)]


@pytest.mark.parametrize("raised", [False, True])
def test_a_sequence_goes_on_at_the_other_worker_with_all_of_its_state(raised: bool) -> None:
    pair = Pair()
    for _ in range(7):
        pair.turn()
    if raised:  # a step that was to fill a new block
        step, pair.a.step = pair.a.step, None
        assert step is not None
        pair.a.core.fail_step(step, "it raised", shared=True)
    pair.order()
    for _ in range(20):
        pair.turn()
    (joined,) = pair.joined()
    assert joined.logprobs is not None  # should the coordinator have missed the newest token
    assert joined.logprobs.logprob == -float(joined.token)
    (moved,) = pair.b.core.scheduler.running.values()
    assert moved.state.params == SamplingParams(**PARAMS)
    assert pair.a.blocks.num_used == 0
    assert pair.a.core.load().counters["handed_over"] == 1
    for _ in range(20):
        pair.turn()
    assert pair.tokens() == dict(enumerate(pair.want))
    assert pair.b.blocks.num_used == 0
    steps = [m for m in pair.b.sent if isinstance(m, StepTokens)]
    assert [m for m in steps if m.finished][-1].finished == {0: "length"}


def test_the_blocks_stay_until_the_other_worker_has_verified_them() -> None:
    pair = Pair()
    pair.turn()
    pair.order()
    no_ack: Callable[[Message], int] = lambda m: 0 if type(m).__name__ == "Ack" else 1  # noqa: E731
    for _ in range(20):
        pair.turn(lossy=no_ack)
    assert len(pair.joined()) == 1
    assert pair.a.blocks.num_used > 0
    for _ in range(10):
        pair.turn()
    assert pair.a.blocks.num_used == 0


@pytest.mark.parametrize("how", ["cancelled", "full", "deaf"])
def test_a_move_that_fails_leaves_the_sequence_running_where_it_is(how: str) -> None:
    pair = Pair()
    pair.turn()
    if how == "full":
        assert pair.b.blocks.allocate(32) is not None
    pair.order()
    for i in range(160):
        pair.turn(lossy=lambda m: 0 if how == "deaf" else 1)
        if how == "cancelled" and i == 0:
            pair.a.core.from_coordinator(Cancel(coordinator=7, dispatches=u32([2])), pair.now)
            pair.b.core.from_coordinator(Cancel(coordinator=7, dispatches=u32([2])), pair.now)
    assert pair.tokens() == dict(enumerate(pair.want))
    assert not pair.joined()
    assert pair.a.blocks.num_used == 0
    assert pair.b.blocks.num_used == (32 if how == "full" else 0)
    reported = [m for m in pair.a.sent if isinstance(m, RequestFailed)]
    assert [m.dispatch for m in reported] == ([] if how == "cancelled" else [2])


def test_a_sequence_that_is_cancelled_while_it_leaves_is_free_on_both_sides() -> None:
    for turns in range(8):
        pair = Pair()
        pair.turn()
        pair.order()
        for _ in range(turns):
            pair.turn(0.001)
        for worker in (pair.a, pair.b):
            worker.core.from_coordinator(Cancel(coordinator=7, dispatches=u32([1, 2])), pair.now)
        for _ in range(3):
            pair.turn(0.02)
        assert pair.a.blocks.num_used == pair.b.blocks.num_used == 0, turns


def test_what_nobody_takes_is_given_back_when_the_time_is_over() -> None:
    pair = Pair()
    pair.turn()
    pair.a.core.drain(pair.now, 0.5)
    loads = [m for m in pair.a.sent if isinstance(m, Load)]
    pair.turn()
    loads = [m for m in pair.a.sent if isinstance(m, Load)]
    assert [m.draining for m in loads] == [True]
    assert not pair.a.core.may_leave
    for _ in range(11):
        pair.turn()
    assert pair.a.core.may_leave
    assert [(m.dispatch, m.kind) for m in pair.a.sent if isinstance(m, RequestFailed)] == [(1, "preempted")]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), before=st.integers(0, 9), prompt=st.integers(1, 9))
def test_nothing_is_lost_or_doubled_whatever_the_mail_does(
    data: st.DataObject, before: int, prompt: int
) -> None:
    pair = Pair(prompt=prompt)
    for _ in range(before):
        pair.turn()
    pair.order()
    copies = st.sampled_from([1, 1, 1, 0, 2])
    for _ in range(12):
        pair.turn(0.1, lambda m: data.draw(copies))
    for _ in range(200):
        pair.turn(0.1)
    assert pair.tokens() == dict(enumerate(pair.want))
    assert pair.a.blocks.num_used == pair.b.blocks.num_used == 0
