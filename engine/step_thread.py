"""The thread that computes: one batch at a time, while the worker's loop goes on listening."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .batch import Batch, StepOutput
from .out_of_memory import is_out_of_memory, release_memory_of


class Runner(Protocol):
    """Anything that executes batches (the model runner, or a stand-in that takes no time)."""

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """``on_layer``, if given, is called with the number of layers whose keys and values are written, as it grows."""


class Step(Protocol):
    """A scheduler's step: the batch, and whatever else it wants back with the output."""

    @property
    def batch(self) -> Batch: ...


S = TypeVar("S", bound=Step)


@dataclass(frozen=True, slots=True)
class Finished(Generic[S]):
    """A step that has run: exactly one of ``output`` and ``error`` is set."""

    step: S
    output: StepOutput | None
    error: Exception | None
    out_of_memory: bool = False  # what ``error`` says; what the step held is free again


class StepThread(Generic[S]):
    """``submit`` a step when idle; ``wake`` is called, from the thread, when it has run; then ``collect`` it.

    ``on_layer``: called, from the thread, as ``Runner.execute`` says.
    """

    def __init__(self, runner: Runner, wake: Callable[[], None], on_layer: Callable[[int], None] | None = None) -> None:
        self._runner, self._wake, self._on_layer = runner, wake, on_layer
        self._inbox: queue.SimpleQueue[S | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Finished[S]] = queue.SimpleQueue()
        self.busy = False
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._thread.start()

    def submit(self, step: S) -> None:
        """Starts a step. Only when not ``busy``."""
        assert not self.busy, "one step at a time"
        self.busy = True
        self._inbox.put(step)

    def collect(self) -> Finished[S] | None:
        """The finished step, if it has finished since the last call."""
        try:
            finished = self._outbox.get_nowait()
        except queue.Empty:
            return None
        self.busy = False
        return finished

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the step that it may be in."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (step := self._inbox.get()) is not None:
            try:
                finished = Finished(step, self._runner.execute(step.batch, self._on_layer), None)
            except Exception as error:  # reported to the loop, which gives the step's requests back or tries a smaller one
                if out_of_memory := is_out_of_memory(error):
                    release_memory_of(error)
                finished = Finished(step, None, error, out_of_memory)
            self._outbox.put(finished)
            self._wake()
