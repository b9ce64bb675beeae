"""Steps that were submitted while another ran: they begin at once, take their tokens from it, and are not run
if it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support.batches import AfterLast, HandSequence, make_batch
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.models import make_checkpoint

from splitserve.engine.step.batch import Batch, SamplingState, StepOutput
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.engine.step.step_progress import StepForecast
from splitserve.engine.step.step_thread import Finished, StepThread
from splitserve.transport.messages.messages import SamplingParams

BLOCK_SIZE = 8
PARAMS = SamplingParams(max_tokens=40, seed=3, min_tokens=4, repetition_penalty=1.3, presence_penalty=0.6)
TIMEOUT_S = 60.0


@dataclass
class Step:
    batch: Batch


class Gate:
    """Runs each step when released, and reports the layers that it passes."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.ran: list[Batch] = []
        self.error: Exception | None = None

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        self.ran.append(batch)
        if on_layer is not None:
            on_layer(1)
        self.begun.release()
        assert self.may_end.acquire(timeout=TIMEOUT_S)
        if self.error is not None:
            raise self.error
        if on_layer is not None:
            on_layer(2)
        return StepOutput(batch.token_ids)


@contextmanager
def thread(
    runner: Gate, ahead_at_layer: int | None
) -> Iterator[tuple[StepThread[Step], threading.Semaphore]]:
    woken = threading.Semaphore(0)
    steps: StepThread[Step] = StepThread(runner, woken.release, ahead_at_layer=ahead_at_layer)
    try:
        yield steps, woken
    finally:
        for _ in range(9):
            runner.may_end.release()
        steps.stop()


def step(token: int) -> Step:
    one = HandSequence([token], [0])
    return Step(make_batch([(one, 1)], BLOCK_SIZE))


def collect(steps: StepThread[Step], woken: threading.Semaphore) -> Finished[Step]:
    while (finished := steps.collect()) is None:
        assert woken.acquire(timeout=TIMEOUT_S)
    return finished


def test_the_next_step_begins_before_anybody_has_collected_the_first() -> None:
    gate = Gate()
    with thread(gate, ahead_at_layer=0) as (steps, woken):
        steps.submit(step(1))
        assert steps.wants_next
        steps.submit(step(2))
        assert not steps.wants_next
        gate.may_end.release()
        assert gate.begun.acquire(timeout=TIMEOUT_S)
        assert gate.begun.acquire(timeout=TIMEOUT_S)
        assert [int(batch.token_ids[0]) for batch in gate.ran] == [1, 2]
        assert collect(steps, woken).output is not None
        assert steps.wants_next


def test_the_next_step_is_wanted_when_the_running_one_is_nearly_done() -> None:
    gate = Gate()
    with thread(gate, ahead_at_layer=1) as (steps, woken):
        steps.submit(step(1))
        assert woken.acquire(timeout=TIMEOUT_S)
        assert steps.wants_next
    gate = Gate()
    with thread(gate, ahead_at_layer=2) as (steps, woken):
        steps.submit(step(1))
        assert gate.begun.acquire(timeout=TIMEOUT_S)
        assert not steps.wants_next


def test_the_loop_is_woken_for_an_output_once_the_next_step_runs() -> None:
    """Before, it would keep Python's lock from the step that is to begin."""
    gate = Gate()
    ran_when_woken: list[int] = []
    steps: StepThread[Step] = StepThread(gate, lambda: ran_when_woken.append(len(gate.ran)), ahead_at_layer=2)
    steps.submit(step(1))
    steps.submit(step(2))
    for _ in range(2):
        assert gate.begun.acquire(timeout=TIMEOUT_S)
        gate.may_end.release()
    for _ in range(2):
        assert steps.collect(patience_s=TIMEOUT_S) is not None
    steps.stop()
    assert ran_when_woken[:3] == [1, 2, 2]  # the first is nearly done, it is over, the second is nearly done


def test_steps_that_are_not_made_ahead_are_wanted_when_the_last_has_ended() -> None:
    gate = Gate()
    with thread(gate, ahead_at_layer=None) as (steps, woken):
        steps.submit(step(1))
        assert gate.begun.acquire(timeout=TIMEOUT_S)
        assert not steps.wants_next
        gate.may_end.release()
        assert collect(steps, woken).output is not None
        assert steps.wants_next


def test_a_step_may_be_waited_for() -> None:
    gate = Gate()
    with thread(gate, ahead_at_layer=0) as (steps, _):
        steps.submit(step(1))
        assert steps.collect(patience_s=0.001) is None
        gate.may_end.release()
        assert steps.collect(patience_s=TIMEOUT_S) is not None
        assert not steps.busy


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("shapes do not fit")])
def test_what_follows_a_failed_step_is_not_run(error: Exception) -> None:
    gate = Gate()
    gate.error = error
    with thread(gate, ahead_at_layer=0) as (steps, woken):
        steps.submit(step(1))
        steps.submit(step(2))
        gate.may_end.release()
        assert collect(steps, woken).error is error
        skipped = collect(steps, woken)
        assert (skipped.output, skipped.error) == (None, None)
        assert [int(batch.token_ids[0]) for batch in gate.ran] == [1]
        gate.error = None
        steps.submit(step(3))
        gate.may_end.release()
        assert collect(steps, woken).output is not None


class FakeDevice:
    """Takes steps as they come, and ends each when it is let."""

    def __init__(self) -> None:
        self.launched, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.fails_to_launch, self.fails = False, False

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        raise AssertionError("steps are launched here")

    def launch(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Callable[[], StepOutput]:
        self.launched.release()
        if self.fails_to_launch:
            raise MemoryError

        def wait() -> StepOutput:
            assert self.may_end.acquire(timeout=TIMEOUT_S)
            if self.fails:
                raise RuntimeError("an assertion on the device")
            return StepOutput(batch.token_ids)

        return wait


def test_a_device_has_the_next_step_before_it_is_through_with_the_first() -> None:
    device, woken = FakeDevice(), threading.Semaphore(0)
    steps: StepThread[Step] = StepThread(device, woken.release, launch=device.launch)
    for token in (1, 2):
        steps.submit(step(token))
    assert device.launched.acquire(timeout=TIMEOUT_S)
    assert device.launched.acquire(timeout=TIMEOUT_S)  # and none has ended
    assert steps.collect() is None
    for token in (1, 2):
        device.may_end.release()
        output = collect(steps, woken).output
        assert output is not None
        assert output.token_ids.tolist() == [token]
    steps.stop()


class HeldForecast(StepForecast):
    """Reports that a step is nearly over on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.nearly_over = threading.Semaphore(0)

    def sleep_until_nearly_over(self) -> None:
        assert self.nearly_over.acquire(timeout=TIMEOUT_S)


def test_a_device_is_given_the_next_step_when_the_running_one_is_expected_to_be_nearly_over() -> None:
    device, woken, forecast = FakeDevice(), threading.Semaphore(0), HeldForecast()
    steps: StepThread[Step] = StepThread(device, woken.release, launch=device.launch, forecast=forecast)
    for token in (1, 2, 3):
        assert steps.wants_next
        steps.submit(step(token))
        assert device.launched.acquire(timeout=TIMEOUT_S)
        assert not steps.wants_next
        if token > 1:  # the step before still runs, and this one waits for it
            device.may_end.release()
            assert collect(steps, woken).output is not None
            assert not steps.wants_next
        while woken.acquire(blocking=False):
            pass
        forecast.nearly_over.release()
        assert woken.acquire(timeout=TIMEOUT_S)
    device.may_end.release()
    assert collect(steps, woken).output is not None
    steps.stop()


@pytest.mark.parametrize("when", ["at its launch", "on the device"])
def test_what_follows_a_step_that_fails_on_a_device_counts_for_nothing(when: str) -> None:
    device, woken = FakeDevice(), threading.Semaphore(0)
    device.fails_to_launch, device.fails = when == "at its launch", when == "on the device"
    steps: StepThread[Step] = StepThread(device, woken.release, launch=device.launch)
    for token in (1, 2):
        steps.submit(step(token))
    device.may_end.release()
    failed, behind = collect(steps, woken), collect(steps, woken)
    assert failed.out_of_memory == (when == "at its launch")
    assert failed.error is not None
    assert (behind.output, behind.error) == (None, None)
    device.fails_to_launch = device.fails = False
    steps.submit(step(3))
    device.may_end.release()
    assert collect(steps, woken).output is not None
    steps.stop()


def fed(batch: Batch, rows: list[int]) -> Batch:
    """Make a batch before the newest tokens are known, which are those of ``rows`` of the step before."""
    known = [s for s in batch.sampling if s is not None]
    behind = [SamplingState(s.params, s.prompt_token_ids, s.output_token_ids[:-1], s.matcher) for s in known]
    return replace(
        batch, token_ids=np.zeros_like(batch.token_ids), sampling=behind, fed_from=np.array(rows, np.int32)
    )


def test_a_model_takes_its_tokens_from_the_step_before(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    runner = ModelRunner(engine_config(tmp_path, "cpu", "float32", BLOCK_SIZE, 64, max_model_len=80))

    def answers(ahead: bool) -> list[list[int]]:
        random = np.random.default_rng(4)
        tables = np.arange(64).reshape(-1, 8).tolist()
        sequences = [
            HandSequence(random.integers(0, VOCAB_SIZE, n).tolist(), tables[n], PARAMS) for n in (5, 3, 7)
        ]
        sequences[1].matcher = AfterLast(VOCAB_SIZE)
        before, counts = [0, 1, 2], [5, 3, 7]
        for rows in ([0, 1, 2], [2, 1, 0], [1, 2], [2, 1], [2]):  # in any order, and ever fewer
            batch = make_batch([(sequences[i], counts[i]) for i in rows], BLOCK_SIZE)
            made_ahead = ahead and counts == [1, 1, 1]
            output = runner.execute(fed(batch, [before.index(i) for i in rows]) if made_ahead else batch)
            for i, token in zip(rows, output.token_ids.tolist(), strict=True):
                sequences[i].num_computed += counts[i]
                sequences[i].output.append(token)
            before, counts = rows, [1, 1, 1]
        return [s.output for s in sequences]

    assert answers(ahead=True) == answers(ahead=False)
