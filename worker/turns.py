"""One model, stepped by two threads while a worker changes its role: strictly in turn, so that neither waits for more than one step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..engine.step.batch import Batch, StepOutput
from ..engine.step.step_thread import Launch, OnLayer, Runner


class Turns:
    """A lock that is had in the order in which it was asked for. (A plain one is had again at once by who has just let it go.)"""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._line: deque[threading.Event] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._wait()
        try:
            yield
        finally:
            self._pass_on()

    def _wait(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._line.append(mine)
        mine.wait()

    def _pass_on(self) -> None:
        with self._guard:
            if self._line:
                self._line.popleft().set()
            else:
                self._taken = False


class RunnerInTurns:
    """See ``Runner``; ``launch`` as ``Launch`` says, where the model can."""

    def __init__(self, runner: Runner, launch: Launch | None) -> None:
        self._runner, self._launch, self._turns = runner, launch, Turns()

    def execute(self, batch: Batch, on_layer: OnLayer | None = None) -> StepOutput:
        with self._turns.turn():
            return self._runner.execute(batch, on_layer)

    def launch(self, batch: Batch, on_layer: OnLayer | None = None) -> Callable[[], StepOutput]:
        assert self._launch is not None, "this model is not launched"
        with self._turns.turn():
            return self._launch(batch, on_layer)
