"""One model that the step threads of two roles share: they alternate, so that neither waits for more than one
step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..engine.step.batch import Batch, StepOutput
from ..engine.step.step_thread import Launch, OnLayer, Runner


class Turns:
    """FIFO lock. (With a plain one the thread that releases it usually takes it again at once.)"""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._queue: deque[threading.Event] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._queue.append(mine)
        mine.wait()

    def _release(self) -> None:
        with self._guard:
            if self._queue:
                self._queue.popleft().set()
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
