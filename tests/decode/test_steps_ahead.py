"""The next step is made while the one before runs, and nothing shows of it: tokens, ends and blocks are those
of one step at a time."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.decode.rows import DecodeStep
from splitserve.decode.scheduler import MAX_IN_FLIGHT, DecodeScheduler
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import SamplingState, StepOutput
from splitserve.transport.messages.messages import SamplingParams

BLOCK, EOS = 4, 0


def generate_next(token: int, position: int) -> int:
    """A token from its input token and that one's position; now and then the end."""
    return (token * 31 + position * 17 + 7) % 23


def answer(num_prompt: int, max_tokens: int) -> list[int]:
    tokens = [9]
    while len(tokens) < max_tokens and tokens[-1] != EOS:
        tokens.append(generate_next(tokens[-1], num_prompt + len(tokens) - 1))
    return tokens


class Device:
    """Runs steps in order, each with the tokens that the one before sampled; keeps the writer of each
    slot."""

    def __init__(self, num_blocks: int) -> None:
        self.queue: deque[DecodeStep] = deque()
        self.sampled = np.empty(0, np.int32)

    def run_oldest(self) -> tuple[DecodeStep, StepOutput]:
        step = self.queue.popleft()
        batch = step.batch
        assert batch.fed_from is not None
        inputs = [
            int(self.sampled[f]) if f >= 0 else int(t)
            for f, t in zip(batch.fed_from, batch.token_ids, strict=True)
        ]
        self.sampled = np.array(
            [generate_next(t, int(p)) for t, p in zip(inputs, batch.positions, strict=True)], np.int32
        )
        return step, StepOutput(self.sampled)

    def written(self) -> list[int]:
        return [int(slot) // BLOCK for step in self.queue for slot in step.batch.slot_mapping]


class Bench:
    def __init__(self, num_blocks: int) -> None:
        self.scheduler = DecodeScheduler(BlockManager(num_blocks), BLOCK, 5, 64, frozenset([EOS]))
        self.device = Device(num_blocks)
        self.states: dict[int, tuple[SamplingState, int]] = {}
        self.ended: dict[int, str] = {}

    def join(self, dispatch: int, num_prompt: int, max_tokens: int) -> bool:
        blocks = (
            self.scheduler.blocks.allocate(-(-num_prompt // BLOCK))
            if self.scheduler.num_running < 5
            else None
        )
        if blocks is None:
            return False
        state = SamplingState(
            SamplingParams(max_tokens=max_tokens, temperature=0.0), list(range(1, num_prompt + 1)), [9]
        )
        self.scheduler.join((1, dispatch), f"r{dispatch}", state, blocks, b"root", 100.0)
        self.states[dispatch] = state, max_tokens
        return True

    def schedule(self) -> None:
        step = self.scheduler.schedule()
        for sequence in self.scheduler.preempted:
            assert not self.device.queue, "preemption waits for what runs"
            self.ended[sequence.key[1]] = "preempted"
        self.scheduler.preempted.clear()
        if step is not None:
            self.device.queue.append(step)
        for block in self.device.written():
            assert self.scheduler.blocks._references[block] == 1, (
                "a step writes what is not its sequence's alone"
            )

    def end_one(self, how: str) -> None:
        if not self.device.queue:
            return
        if how == "complete":
            step, output = self.device.run_oldest()
            result = self.scheduler.complete(step, output)
            for row, reason in result.finished.items():
                self.ended[step.sequences[row].key[1]] = reason
            return
        step = self.device.queue.popleft()
        gone = self.scheduler.separate(step) if how == "separate" else self.scheduler.shrink(step)
        for sequence in gone:
            self.ended[sequence.key[1]] = how
        while self.device.queue:
            assert self.scheduler.schedule() is None
            self.scheduler.skip(self.device.queue.popleft())

    def check(self) -> None:
        for dispatch, (state, max_tokens) in self.states.items():
            want = answer(len(state.prompt_token_ids), max_tokens)
            assert state.output_token_ids == want[: len(state.output_token_ids)]
            if self.ended.get(dispatch) in ("stop", "length"):
                assert state.output_token_ids == want


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_blocks=st.integers(7, 30))
def test_any_order_of_events_gives_the_same_answers(data: st.DataObject, num_blocks: int) -> None:
    bench, dispatches = Bench(num_blocks), iter(range(1000))
    often = ["schedule"] * 5 + ["complete"] * 4 + ["join"] * 3
    events = st.sampled_from([*often, "pause", "resume", "drop", "separate", "shrink"])
    for event in data.draw(st.lists(events, max_size=60)):
        held = [key[1] for key in bench.scheduler.held]
        if event == "schedule":
            bench.schedule()
        elif event == "join":
            bench.join(next(dispatches), data.draw(st.integers(1, 9)), data.draw(st.integers(2, 12)))
        elif event in ("complete", "separate", "shrink"):
            bench.end_one(event)
        elif held and event == "resume":
            bench.scheduler.resume((1, data.draw(st.sampled_from(held))))
        elif held:
            dispatch = data.draw(st.sampled_from(held))
            getattr(bench.scheduler, event)((1, dispatch))
            if event == "drop":
                bench.ended[dispatch] = "dropped"
        bench.check()
    for key in bench.scheduler.held:
        bench.scheduler.resume(key)
    for _ in range(600):
        bench.schedule()
        bench.end_one("complete")
    bench.check()
    assert bench.ended.keys() == bench.states.keys()
    assert bench.scheduler.blocks.num_used == 0
    assert not list(bench.scheduler.block_tables())


def test_a_step_is_ready_when_the_one_before_ends_and_no_more_than_one() -> None:
    bench = Bench(30)
    bench.join(1, 6, 12)
    for _ in range(MAX_IN_FLIGHT):
        bench.schedule()
    assert len(bench.device.queue) == MAX_IN_FLIGHT
    assert bench.scheduler.schedule() is None
    ahead = bench.device.queue[1].batch
    assert (ahead.fed_from == [0]).all()
    assert ahead.positions == bench.device.queue[0].batch.positions + 1


def test_the_last_token_by_length_costs_no_row_and_a_stop_costs_one() -> None:
    for max_tokens, wasted in ((3, 0), (12, 1)):
        bench = Bench(30)
        bench.join(1, 5, max_tokens)
        rows = 0
        for _ in range(30):
            bench.schedule()
            bench.schedule()
            rows += len(bench.device.queue[0].sequences) if bench.device.queue else 0
            bench.end_one("complete")
        want = answer(5, max_tokens)
        assert (want[-1] == EOS) == bool(wasted)
        assert rows == len(want) - 1 + wasted
        assert bench.scheduler.blocks.num_used == 0
