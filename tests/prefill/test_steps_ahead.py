"""Prefill steps made before the one that runs has been booked: every token once, in order, whatever fails;
and keys and values leave a GPU beside the computation, when they are final."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.models import make_checkpoint
from support.receivers import receiver

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.device import mark_stream, passed
from splitserve.engine.load_model import load_model
from splitserve.engine.settings import WorkerSettings
from splitserve.engine.step.batch import StepOutput
from splitserve.engine.step.step_progress import LayerProgress
from splitserve.prefill.chunks import PrefillStep
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    Cancel,
    Meet,
    ModelIdentity,
    Peer,
    Prefill,
    RequestFailed,
    RequestSpec,
    SamplingParams,
    u32,
)
from splitserve.worker.steps import Prompts, RunningStep

BLOCK = 4
PEER = Peer(worker_id="d", incarnation=1, address="inproc://d")
IDENTITY = ModelIdentity(
    kv_name="model",
    dtype="float32",
    block_size=BLOCK,
    cache_map=states(1, 64),
    block_bytes=64,
    numerics="fast",
)


def make_core(num_blocks: int = 64, budget: int = 8) -> PrefillCore:
    meet = Meet(worker_id="p", incarnation=1, host="h", pid=1, model=IDENTITY, movers=("tcp",))
    scheduler = PrefillScheduler(BlockManager(num_blocks), BLOCK, "model", budget, max_num_seqs=4)
    return PrefillCore(meet, scheduler, receiver(meet, scheduler.blocks), frozenset(), 512)


def prompt(dispatch: int, length: int) -> Prefill:
    spec = RequestSpec(
        request_id=f"r{dispatch}", epoch=0, dispatch=dispatch, coordinator=1,
        token_ids=u32([dispatch * 1000 + i for i in range(length)]),
        num_prompt_tokens=length, sampling=SamplingParams(max_tokens=1), deadline_s=60.0,
    )  # fmt: skip
    return Prefill(spec=spec, decode=PEER)


def output(step: PrefillStep) -> StepOutput:
    return StepOutput(np.full(step.batch.num_seqs, 7, np.int32))


def complete(core: PrefillCore, step: PrefillStep) -> None:
    for chunk in step.chunks:
        assert chunk.start == chunk.sequence.num_computed, "chunks are booked in order, without a gap"
    core.complete(step, output(step), 0.0)


def test_the_next_chunk_follows_the_one_that_runs() -> None:
    core = make_core()
    core.from_coordinator(prompt(1, 20), 0.0)
    steps = [core.schedule(0.0) for _ in range(4)]
    assert [(step.chunks[0].start, step.chunks[0].count) for step in steps if step] == [
        (0, 8),
        (8, 8),
        (16, 4),
    ]
    assert steps[3] is None
    assert core.scheduler.num_waiting_tokens() == 20, "nothing is booked yet"
    for step in steps[:3]:
        assert step is not None
        complete(core, step)
    assert core.load().counters["output_tokens"] == 1


def test_a_step_that_takes_long_is_not_charged_for_the_one_before() -> None:
    core = make_core()
    core.from_coordinator(prompt(1, 20), 0.0)
    first, second = core.schedule(1.0), core.schedule(1.5)
    assert first is not None
    assert second is not None
    core.complete(first, output(first), 3.0)
    core.complete(second, output(second), 4.0)
    assert core.load().counters["full_step_seconds"] == pytest.approx(3.0), "from 1 to 3, then from 3 to 4"


@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_every_prompt_is_computed_whatever_fails_and_no_block_stays(seed: int, lengths: list[int]) -> None:
    """Up to two steps at a time; some fail, run out of memory or are skipped as the step thread does it; some
    prompts are cancelled."""
    chance, core = random.Random(seed), make_core(num_blocks=24)
    for dispatch, length in enumerate(lengths):
        core.from_coordinator(prompt(dispatch, length), 0.0)
    in_flight: deque[PrefillStep] = deque()
    broken, cancelled, failed = False, set(), set()
    for turn in range(2000):
        while len(in_flight) < 2 and (step := core.schedule(0.0)) is not None:
            broken = broken and bool(in_flight)
            in_flight.append(step)
        if not in_flight:
            break
        step, fate = in_flight.popleft(), chance.random() if turn < 50 else 1.0
        if broken:
            core.scheduler.skip(step)
        elif fate < 0.1:
            broken = True
            core.fail_step(step, "it broke")
        elif fate < 0.25:
            broken = True
            core.shrink_step(step, "no memory")
        else:
            complete(core, step)
        if fate > 0.9 and turn < 50:
            cancelled.add(dispatch := chance.randrange(len(lengths)))
            core.from_coordinator(Cancel(coordinator=1, dispatches=u32([dispatch])), 0.0)
        failed |= {m.dispatch for m in core.take_reports() if isinstance(m, RequestFailed)}
        core.take(0.0)
    assert not core.scheduler.held
    assert core.blocks.num_used == 0
    assert core.load().counters["output_tokens"] >= len(lengths) - len(cancelled | failed)


def test_a_prompt_for_which_a_block_is_too_much_memory_fails_and_is_not_tried_for_ever() -> None:
    core = make_core(budget=BLOCK)
    core.from_coordinator(prompt(1, 10), 0.0)
    step = core.schedule(0.0)
    assert step is not None
    core.shrink_step(step, "no memory")
    (failed,) = core.take_reports()
    assert isinstance(failed, RequestFailed)
    assert (failed.dispatch, failed.kind, failed.message) == (1, "internal", "no memory")
    assert core.schedule(0.0) is None
    assert core.blocks.num_used == 0


def test_a_worker_whose_time_to_drain_is_over_gives_back_once_and_waits_for_no_running_step() -> None:
    core = make_core()
    core.from_coordinator(prompt(1, 10), 0.0)
    assert core.schedule(0.0) is not None
    core.drain(0.0, 1.0)
    core.tick(0.9)
    assert not core.may_leave
    for now in (1.0, 1.1):
        core.tick(now)
        assert core.may_leave
    assert [m.kind for m in core.take_reports() if isinstance(m, RequestFailed)] == ["preempted"]


class Event:
    """The event of a played stream."""

    played: ClassVar[list[Event]] = []

    def __init__(self, blocking: bool = False) -> None:
        self.is_over, self.waited_for = False, False

    def record(self, stream: object) -> None:
        assert stream == "compute"
        Event.played.append(self)

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.waited_for = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    Event.played = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "compute")
    return Event.played


def on_gpu(every: int) -> LayerProgress:
    return LayerProgress(lambda: None, every, mark_stream)


def test_layers_leave_a_gpu_when_its_stream_has_passed_them_and_the_next_step_comes_at_half(
    events: list[Event],
) -> None:
    core = make_core()
    core.from_coordinator(prompt(1, 8), 0.0)
    step = core.schedule(0.0)
    assert step is not None
    running = RunningStep(None, Prompts(core, step), 2, 4, on_gpu(2))
    for layer in range(1, 9):
        running.progress.reached(layer)  # the host is far ahead of the device
    assert len(events) == 4
    assert running.progress.pending
    assert (running.num_layers_to_send(), running.is_half_done) == (0, False)
    events[0].is_over = True
    assert (running.num_layers_to_send(), running.is_half_done) == (2, False)
    events[1].is_over = True
    assert (running.num_layers_to_send(), running.is_half_done) == (4, True)


def test_where_nothing_is_to_leave_early_only_the_half_is_told(events: list[Event]) -> None:
    core = make_core()
    core.from_coordinator(prompt(1, 8), 0.0)
    step = core.schedule(0.0)
    assert step is not None
    running = RunningStep(None, Prompts(core, step), 0, 4, on_gpu(4))
    for layer in range(1, 9):
        running.progress.reached(layer)
    assert len(events) == 2
    events[0].is_over = True
    assert (running.num_layers_to_send(), running.is_half_done) == (0, True)


def test_a_chunk_without_a_token_is_over_when_the_device_has_passed_it(events: list[Event]) -> None:
    wait = passed(torch.device("cuda"))
    assert len(events) == 1
    assert not events[0].waited_for
    wait()
    assert events[0].waited_for


def test_a_launched_model_computes_chunk_after_chunk(tmp_path: Path) -> None:
    """What the worker's loop does for a GPU, with a model that is over when it is launched: the tokens are
    those of steps in turn."""
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=2)
    settings = WorkerSettings(
        model=tmp_path,
        insecure=True,
        device="cpu",
        dtype="float32",
        num_blocks=64,
        block_size=BLOCK,
        max_model_len=128,
    )
    model = load_model(settings)

    def tokens(at_once: int) -> list[int]:
        core, reported, waiting = make_core(), [], deque[tuple[PrefillStep, Callable[[], StepOutput]]]()
        for dispatch, length in enumerate((30, 5, 17)):
            message = prompt(dispatch, length)
            spec = replace(message.spec, token_ids=u32(range(3, 3 + length)))
            core.from_coordinator(replace(message, spec=spec), 0.0)
        while True:
            while len(waiting) < at_once and (step := core.schedule(0.0)) is not None:
                waiting.append((step, model.runner.launch(step.batch)))  # type: ignore[attr-defined]
            if not waiting:
                return reported
            step, wait = waiting.popleft()
            result = wait()
            reported += [int(token) for token in result.token_ids if token >= 0]
            core.complete(step, result, 0.0)

    assert sorted(tokens(2)) == sorted(tokens(1))
    assert len(tokens(2)) == 3
