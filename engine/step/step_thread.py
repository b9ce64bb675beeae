"""The thread that computes: one batch after the other, while the worker's loop goes on listening.

A step may be submitted while another runs: it begins the moment that one has ended. Should that one fail, it
is not run at all, for its inputs would be wrong. A GPU is given it at once, and begins by itself; a second
thread then waits for what comes of steps.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from ..errors import DeviceLostError, is_device_lost, is_out_of_memory, release_memory_of
from .batch import Batch, StepOutput
from .step_progress import BusyClock, StepForecast

OnLayer = Callable[[int], None]


class Runner(Protocol):
    """Anything that executes batches (the model runner, or a stand-in that takes no time)."""

    def execute(self, batch: Batch, on_layer: OnLayer | None = None) -> StepOutput:
        """``on_layer``, if given, is called with the number of layers whose keys and values are written, as
        it grows from 0."""


Launch = Callable[[Batch, OnLayer | None], Callable[[], StepOutput]]
"""Begins a batch, on a device that does one after the other; the call that it returns waits for the
output."""


class Step(Protocol):
    """A scheduler's step: the batch, and whatever else it wants back with the output."""

    @property
    def batch(self) -> Batch: ...


S = TypeVar("S", bound=Step)


class StepDevice(Protocol[S]):
    """Computes one step after the other, in the order in which they were submitted; there is one in a
    process, for all of its roles.

    ``wake`` (given at construction) is called when a step has ended, and when ``wants_next`` becomes true.
    Live: ``StepThread``. Under virtual time: a latency model, or the adversary's.
    """

    @property
    def busy(self) -> bool:
        """Whether a step has been submitted and not been collected."""

    @property
    def wants_next(self) -> bool:
        """Whether a step may be submitted: none has been, or but one, which is nearly done."""

    @property
    def busy_seconds(self) -> float:
        """Seconds in which a step has run so far."""

    def submit(self, step: S, on_layer: OnLayer | None = None) -> None:
        """Begin a step, now or after the running one. If that one fails, this one is not run.

        ``on_layer``, if given, is called, from any thread, with the number of layers whose keys and values
        are written, as it grows."""

    def collect(self, patience_s: float = 0.0) -> Finished[S] | None:
        """Return the oldest step that is over and has not been collected, or is over within
        ``patience_s``."""

    def stop(self) -> None:
        """End what computes."""


@dataclass(frozen=True, slots=True)
class Finished(Generic[S]):
    """A step that is over: it has an output, or an error; neither if it was not run, because the step before
    it failed. After a DeviceLostError no other step can run."""

    step: S
    output: StepOutput | None
    error: Exception | None
    out_of_memory: bool = False  # whether ``error`` is one; the step's memory is free again


@dataclass(frozen=True, slots=True)
class _Launched(Generic[S]):
    step: S
    follows: bool
    watched: bool
    at: float  # monotonic time
    # None: not launched, because the one before could not be
    output: Callable[[], StepOutput] | Exception | None

    def wait(self) -> StepOutput:
        if isinstance(self.output, Exception):
            raise self.output
        assert self.output is not None, "what follows a failed step is not waited for"
        return self.output()


class StepThread(Generic[S]):
    """Runs steps on a thread: ``submit`` one while it ``wants_next``, ``collect`` it after ``wake``.

    ``ahead_at_layer``: the next step is wanted once the running one has written the keys and values of this
    many layers (``wake`` is called then, too). Late is better: what arrives until then takes part. 0: as soon
    as it is submitted; None: when it has ended. ``forecast``, for launched steps: the next one is wanted when
    the running one is expected to be nearly over; at once behind one with an ``on_layer`` of its own, whose
    time the last ones do not predict.
    """

    def __init__(
        self,
        runner: Runner,
        wake: Callable[[], None],
        ahead_at_layer: int | None = 0,
        launch: Launch | None = None,
        forecast: StepForecast | None = None,
    ) -> None:
        """``launch``: used instead of the runner, where it is given."""
        assert forecast is None or (launch is not None and ahead_at_layer == 0), "of steps that are launched"
        self._runner, self._wake, self._forecast = runner, wake, forecast
        self._ahead_at_layer = ahead_at_layer
        self._inbox: queue.SimpleQueue[tuple[S, bool, OnLayer | None] | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Finished[S]] = queue.SimpleQueue()
        self._num_in_flight = 0
        self._num_submitted = self._num_begun = self._num_nearly_done = 0
        self._launch, self._launched = launch, queue.SimpleQueue[_Launched[S] | None]()
        self._busy = BusyClock()
        self._broken = False  # the last step that is over failed, or followed one that did
        works = [self._run] if launch is None else [self._launch_all, self._finish_all]
        self._threads = [threading.Thread(target=work, name="step", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """See ``StepDevice``."""
        return self._num_in_flight > 0

    @property
    def wants_next(self) -> bool:
        """See ``StepDevice``."""
        if not self.busy:
            return True
        if self._num_in_flight > 1 or self._ahead_at_layer is None:
            return False
        waits = self._ahead_at_layer > 0 or self._forecast is not None
        return not waits or self._num_nearly_done == self._num_submitted

    @property
    def busy_seconds(self) -> float:
        """See ``StepDevice``."""
        return self._busy.seconds(time.monotonic())

    def submit(self, step: S, on_layer: OnLayer | None = None) -> None:
        """See ``StepDevice``. ``on_layer`` is called from the thread."""
        self._inbox.put((step, self.busy, on_layer))
        self._num_in_flight += 1
        self._num_submitted += 1

    def collect(self, patience_s: float = 0.0) -> Finished[S] | None:
        """See ``StepDevice``."""
        if not patience_s and self._outbox.empty():
            return None
        try:
            finished = self._outbox.get(patience_s > 0, patience_s)
        except queue.Empty:
            return None
        self._num_in_flight -= 1
        return finished

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the threads after the steps that they may have."""
        self._inbox.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            step, follows, on_layer = item
            self._num_begun += 1
            on_layer = self._with_own(on_layer) if self._ahead_at_layer else on_layer
            self._finish(step, follows, time.monotonic(), partial(self._runner.execute, step.batch, on_layer))

    def _launch_all(self) -> None:
        assert self._launch is not None
        broken = False
        while (item := self._inbox.get()) is not None:
            step, follows, on_layer = item
            broken = broken and follows
            output: Callable[[], StepOutput] | Exception | None = None
            if not broken:
                try:
                    output = self._launch(step.batch, on_layer)
                except Exception as error:  # reported like one of the step itself
                    output, broken = error, True
            self._launched.put(_Launched(step, follows, on_layer is not None, time.monotonic(), output))
        self._launched.put(None)

    def _finish_all(self) -> None:
        while (launched := self._launched.get()) is not None:
            self._num_begun += 1
            self._finish(launched.step, launched.follows, launched.at, partial(self._wait_for, launched))

    def _wait_for(self, launched: _Launched[S]) -> StepOutput:
        if self._forecast is None or not callable(launched.output):
            return launched.wait()
        if launched.watched:
            self._nearly_done()
            return launched.wait()
        self._forecast.begin(launched.at)
        self._forecast.sleep_until_nearly_over()
        self._nearly_done()
        output = launched.wait()
        self._forecast.end()
        return output

    def _finish(self, step: S, follows: bool, at: float, output: Callable[[], StepOutput]) -> None:
        self._broken = self._broken and follows
        self._busy.begin(at)
        finished: Finished[S] = Finished(step, None, None)
        if not self._broken:
            try:
                finished = Finished(step, output(), None)
            except Exception as error:  # the loop gives the step's requests back, or tries a smaller one
                finished, self._broken = _failed(step, error), True
        self._busy.end(time.monotonic())
        self._outbox.put(finished)
        if not self._ahead_at_layer or self._inbox.empty():
            self._wake()  # else once the next step's layers run: until then the loop would take Python's lock

    def _with_own(self, on_layer: OnLayer | None) -> OnLayer:
        """Return ``on_layer`` together with what the thread itself wants to know of layers."""
        if on_layer is None:
            return self._reached

        def both(num_layers: int) -> None:
            on_layer(num_layers)
            self._reached(num_layers)

        return both

    def _reached(self, num_layers: int) -> None:
        if num_layers == self._ahead_at_layer:
            self._nearly_done()
        elif not self._outbox.empty():
            self._wake()

    def _nearly_done(self) -> None:
        self._num_nearly_done = self._num_begun
        self._wake()


def _failed(step: S, error: Exception) -> Finished[S]:
    """What the loop is to know of it; where memory was short, what the step held is free again."""
    out_of_memory = is_out_of_memory(error)
    if out_of_memory:
        try:
            release_memory_of(error)
        except RuntimeError as worse:  # the GPU has more than too little memory
            error, out_of_memory = worse, False
    if is_device_lost(error):
        lost = DeviceLostError(
            f"the GPU serves this process no longer ({str(error).splitlines()[0]}): it ends, to be started "
            "anew"
        )
        lost.__cause__, error = error, lost
    return Finished(step, None, error, out_of_memory)
