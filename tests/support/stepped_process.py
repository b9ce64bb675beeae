"""A process of both roles without a worker around it: two cores and their steps, on a device that runs a step
when the test lets it."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
from msgspec.structs import replace
from support.receivers import receiver

from splitserve.decode.core import DecodeCore
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import Batch, SamplingState, StepOutput
from splitserve.engine.step.step_progress import LayerProgress
from splitserve.engine.step.step_thread import Finished, OnLayer
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.handoff.protocol import ToCoordinator
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    Cancel,
    FirstToken,
    Meet,
    ModelIdentity,
    Peer,
    Prefill,
    RequestFailed,
    RequestSpec,
    SamplingParams,
    StepTokens,
    TokenLogprobs,
    from_u32,
    u32,
)
from splitserve.worker.steps import RunningStep, Steps

BLOCK, BUDGET, NUM_LAYERS = 4, 12, 4
MODEL = ModelIdentity(kv_name="m", dtype="float32", block_size=BLOCK, cache_map=states(1, 64), block_bytes=64)
MEET = Meet(worker_id="w:prefill", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
PEER = Peer(worker_id="elsewhere", incarnation=1, address="inproc://elsewhere")


def token_after(token: int, position: int) -> int:
    return (token * 31 + position * 17 + 7) % 1009


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = [*prompt]
    for _ in range(num_tokens):
        tokens.append(token_after(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


class Device:
    """See ``StepDevice``. Runs the oldest step when the test lets it. Its memory has the token of each slot,
    which every later step that reads the slot must find there."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.queue: deque[RunningStep] = deque()
        self.over: deque[Finished[RunningStep]] = deque()
        self.submitted: list[RunningStep] = []
        self.poison: set[int] = set()  # first tokens of prompts whose steps raise
        self.no_memory, self.most_tokens = 0.0, 1000  # share of steps that lack it; more tokens always do
        self.busy_seconds = 0.0
        self.wants_ahead = False
        self._broken = False
        self._sampled = np.empty(0, np.int32)
        self._slots: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.over)

    @property
    def wants_next(self) -> bool:
        return not self.busy or (len(self.queue) + len(self.over) == 1 and self.wants_ahead)

    def submit(self, step: RunningStep, on_layer: OnLayer | None = None) -> None:
        assert len(self.queue) + len(self.over) < 2
        self._broken = self._broken and self.busy
        self.queue.append(step)
        self.submitted.append(step)
        self.wants_ahead = False
        if on_layer is not None and self._chance.random() < 0.7:
            for layer in range(1, NUM_LAYERS + 1):
                on_layer(layer)

    def collect(self, patience_s: float = 0.0) -> Finished[RunningStep] | None:
        return self.over.popleft() if self.over else None

    def stop(self) -> None: ...

    def run_oldest(self) -> None:
        step = self.queue.popleft()
        if self._broken:
            self.over.append(Finished(step, None, None))
            return
        poisoned = any(self._is_poisoned(state) for state in step.batch.sampling)
        too_large = step.batch.num_tokens > self.most_tokens
        if poisoned or too_large or self._chance.random() < self.no_memory:
            self._broken = True
            self.over.append(Finished(step, None, ValueError("it broke"), not poisoned))
            return
        self.over.append(Finished(step, self._execute(step.batch), None))

    def _is_poisoned(self, state: SamplingState | None) -> bool:
        return state is not None and int(state.prompt_token_ids[0]) in self.poison

    def _execute(self, batch: Batch) -> StepOutput:
        inputs = batch.token_ids.copy()
        if batch.fed_from is not None:
            assert len(batch.fed_from) == batch.num_tokens
            fed = batch.fed_from >= 0
            inputs[fed] = self._sampled[batch.fed_from[fed]]
        for slot, token in zip(batch.slot_mapping.tolist(), inputs.tolist(), strict=True):
            self._slots[slot] = token
        tokens = np.full(batch.num_seqs, -1, np.int32)
        logprobs = {}
        for row, state in enumerate(batch.sampling):
            if state is None:
                continue
            last = int(batch.query_start_loc[row + 1]) - 1
            position, table = int(batch.positions[last]), batch.block_tables[row].tolist()
            assert position + 1 == batch.seq_lens[row]
            known = [*state.prompt_token_ids, *state.output_token_ids]
            for i in range(min(len(known), position + 1)):
                slot = table[i // BLOCK] * BLOCK + i % BLOCK
                assert self._slots[slot] == known[i], "a row reads its own sequence's tokens"
            tokens[row] = token_after(int(inputs[last]), position)
            if state.params.logprobs is not None:
                logprobs[row] = TokenLogprobs(-float(tokens[row]))
        self._sampled = tokens
        return StepOutput(tokens, logprobs)


class SteppedProcess:
    """A prefill core, a decode core and their steps. What the first computes joins the second at once, in
    blocks of its own, as if it had been handed over."""

    def __init__(
        self, seed: int, max_num_seqs: int = 8, budget: int = BUDGET, launches: bool = False
    ) -> None:
        self.blocks, self.chance = BlockManager(400), random.Random(seed)
        prompts = PrefillScheduler(self.blocks, BLOCK, "m", budget, 4)
        self.prefill = PrefillCore(MEET, prompts, receiver(MEET, self.blocks), frozenset(), 256)
        self.scheduler = DecodeScheduler(self.blocks, BLOCK, max_num_seqs, 256, frozenset())
        meet = replace(MEET, worker_id="w:decode")
        self.decode = DecodeCore(meet, self.scheduler, receiver(meet, self.blocks))
        self.device = Device(self.chance)

        def progress(every: int) -> LayerProgress:
            return LayerProgress(lambda: None, every)

        self.steps = Steps(self.device, NUM_LAYERS, progress, lambda: 0.0, launches)
        self.steps.add(self.prefill)
        self.steps.add(self.decode)
        self.budget = budget
        self.prompts: dict[int, tuple[list[int], int]] = {}  # by dispatch: with how many tokens to generate
        self.answers: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ended: set[int] = set()
        self.failed: dict[int, str] = {}
        self.joining: deque[tuple[int, int]] = deque()

    def ask(self, dispatch: int, length: int, num_tokens: int) -> None:
        prompt = [dispatch * 256 + i for i in range(length)]
        self.prompts[dispatch] = prompt, num_tokens
        spec = RequestSpec(
            request_id=f"r{dispatch}", epoch=0, dispatch=dispatch, coordinator=1, token_ids=u32(prompt),
            num_prompt_tokens=length, sampling=SamplingParams(max_tokens=num_tokens, logprobs=0),
            deadline_s=60.0,
        )  # fmt: skip
        self.prefill.from_coordinator(Prefill(spec=spec, decode=PEER), 0.0)

    def turn(self) -> None:
        """One of the worker's loop."""
        self.device.wants_ahead = self.chance.random() < 0.7
        if self.device.queue and self.chance.random() < 0.6:
            self.device.run_oldest()
        self.steps.collect(0.0)
        self._take()
        before = len(self.device.submitted)
        due = {s.key[1] for s in self._due()}
        self.steps.launch(0.0)
        for step in self.device.submitted[before:]:
            self._check(step, due)
        self._take()

    def _due(self) -> list[Any]:
        """Sequences that a step made now must have: all whose last token is not in flight."""
        return [
            s
            for s in self.scheduler.running.values()
            if len(s.state.output_token_ids) + s.in_flight <= s.last_index
        ]

    def _check(self, step: RunningStep, due: set[int]) -> None:
        rows = step.sequences.step.sequences if step.sequences is not None else []
        chunks = step.prompts.step.chunks if step.prompts is not None else []
        num_prompt_tokens = sum(chunk.count for chunk in chunks)
        assert len(rows) + num_prompt_tokens == step.batch.num_tokens
        if chunks:
            assert num_prompt_tokens <= max(self.budget - len(rows), BLOCK), "the budget holds"
            tried_apart = any(chunk.sequence.alone for chunk in chunks)
            assert not (tried_apart and (rows or len(chunks) > 1)), "one that is tried apart is alone"
            if not tried_apart and not self.prefill.scheduler.tries_apart:
                assert due <= {s.key[1] for s in rows}, "rows are never left out while chunks are in"
        elif not step.sequences.step.alone:  # type: ignore[union-attr]
            waiting = [s for s in self.prefill.scheduler.running.values() if s.unscheduled and not s.alone]
            assert not waiting, "prompts are not starved"

    def _take(self) -> None:
        for action in (*self.prefill.take(0.0), *self.decode.take(0.0)):
            if isinstance(action, ToCoordinator):
                self._report(action.message)
        while self.joining and self.scheduler.num_running < self.scheduler.row_limit.now:
            self._join(*self.joining.popleft())

    def _report(self, message: Any) -> None:
        if isinstance(message, RequestFailed):
            self.failed[message.dispatch] = message.kind
        elif isinstance(message, FirstToken):
            assert message.token is not None
            assert message.logprobs is not None
            self.answers[message.dispatch] = [message.token]
            self.logprobs[message.dispatch] = [message.logprobs.logprob]
            if message.finished:
                self.ended.add(message.dispatch)
            else:
                self.prefill.from_coordinator(Cancel(coordinator=1, dispatches=u32([message.dispatch])), 0.0)
                self.joining.append((message.dispatch, message.token))
        elif isinstance(message, StepTokens):
            dispatches = from_u32(message.dispatches)
            for row, (dispatch, token) in enumerate(zip(dispatches, from_u32(message.tokens), strict=True)):
                self.answers[dispatch].append(token)
                self.logprobs[dispatch].append(message.logprobs[row].logprob)
            self.ended |= {dispatches[row] for row in message.finished}

    def _join(self, dispatch: int, token: int) -> None:
        prompt, num_tokens = self.prompts[dispatch]
        blocks = self.blocks.allocate(-(-len(prompt) // BLOCK))
        assert blocks is not None
        for i, of_prompt in enumerate(prompt):  # the handoff
            self.device._slots[blocks[i // BLOCK] * BLOCK + i % BLOCK] = of_prompt
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=0)
        state = SamplingState(params, prompt, [token])
        self.scheduler.join((1, dispatch), f"r{dispatch}", state, blocks, b"root", 100.0)

    def run(self, most_turns: int = 3000) -> None:
        for _ in range(most_turns):
            if len(self.ended | self.failed.keys()) == len(self.prompts) and not self.device.busy:
                break
            self.turn()
        assert self.ended | self.failed.keys() == self.prompts.keys(), "every request ends"
        assert self.blocks.num_used == 0, "no block stays"

    def check_answers(self) -> None:
        for dispatch in self.ended:
            want = answer(*self.prompts[dispatch])
            assert self.answers[dispatch] == want
            assert self.logprobs[dispatch] == [-float(token) for token in want]
