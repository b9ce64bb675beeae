"""Two roles step one model in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from splitserve.engine.step.batch import StepOutput
from splitserve.worker.turns import RunnerInTurns

TIMEOUT_S = 60.0


class Gated:
    """Runs a step when it is let; notes whose it was."""

    def __init__(self) -> None:
        self.entered, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.order: list[Any] = []
        self.running = 0

    def execute(self, batch: Any, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        self.running += 1
        assert self.running == 1, "one at a time"
        self.order.append(batch)
        self.entered.release()
        assert self.may_end.acquire(timeout=TIMEOUT_S)
        self.running -= 1
        return StepOutput(np.zeros(1, np.int32))


def test_who_asks_first_is_first_even_where_another_is_always_back_at_once() -> None:
    model = Gated()
    runner = RunnerInTurns(model, None)
    with ThreadPoolExecutor(2) as pool:

        def greedy() -> None:
            for step in range(3):
                runner.execute(("decode", step))  # type: ignore[arg-type]

        steps = pool.submit(greedy)
        assert model.entered.acquire(timeout=TIMEOUT_S)
        waiting = threading.Event()

        def patient() -> None:
            waiting.set()
            runner.execute(("prefill", 0))  # type: ignore[arg-type]

        other = pool.submit(patient)
        assert waiting.wait(TIMEOUT_S)
        while not runner._turns._queue:
            assert not other.done()
        for _ in range(4):
            model.may_end.release()
        steps.result(TIMEOUT_S)
        other.result(TIMEOUT_S)
    assert model.order == [("decode", 0), ("prefill", 0), ("decode", 1), ("decode", 2)]
