"""From a role's core to the thread that computes, and back: steps are submitted, and what comes of them goes
to the core."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Generic, Protocol, TypeVar

from ..decode.core import DecodeCore
from ..decode.rows import DecodeStep
from ..engine.errors import DeviceLostError
from ..engine.step.batch import StepOutput
from ..engine.step.layer_progress import LayerProgress
from ..engine.step.step_forecast import StepForecast
from ..engine.step.step_thread import Finished, Step, StepThread
from ..engine.worker_model import WorkerModel
from ..prefill.core import PrefillCore
from ..prefill.scheduler import PrefillStep

HEAD_START_S = 1e-4  # of a step, before its prompts are offered to decode workers
S = TypeVar("S", bound=Step)
S_in = TypeVar("S_in", contravariant=True)
_log = logging.getLogger(__name__)


class StepCore(Protocol[S_in]):
    """A role's core, as far as the end of a step goes."""

    def complete(self, step: S_in, output: StepOutput, now: float) -> None: ...
    def skip_step(self, step: S_in) -> None: ...
    def fail_step(self, step: S_in, reason: str) -> None: ...


class Steps(ABC, Generic[S]):
    """The steps of one role that are under way. The step thread calls ``wake`` when the loop has something to
    do here."""

    role: ClassVar[str]

    def __init__(self, core: StepCore[S], thread: StepThread[S]) -> None:
        self._ends_in = core
        self._thread = thread

    @abstractmethod
    def launch(self, now: float) -> bool:
        """Submit what the thread wants by now. Return whether anything was submitted."""

    def collect(self, now: float) -> None:
        """Hand steps that are over to the core. Raises DeviceLostError."""
        while (finished := self._thread.collect()) is not None:
            self._book(finished, now)

    @property
    def pending(self) -> bool:
        """Whether ``collect`` must be called soon, though nothing wakes the loop."""
        return False

    @property
    def busy_seconds(self) -> float:
        """See ``StepThread``."""
        return self._thread.busy_seconds

    def stop(self) -> None:
        """End the thread."""
        self._thread.stop()

    def _book(self, finished: Finished[S], now: float) -> None:
        if finished.output is not None:
            self._ends_in.complete(finished.step, finished.output, now)
        elif finished.error is None:
            self._ends_in.skip_step(finished.step)
        elif isinstance(finished.error, DeviceLostError):  # no request's fault: all of them go on elsewhere
            raise finished.error
        elif finished.out_of_memory:
            self._shrink(finished.step, finished.error)
        else:
            _log.error(
                "a %s step of %d requests failed; one alone in its step goes back to the coordinator, "
                "several are tried apart",
                self.role,
                finished.step.batch.num_seqs,
                exc_info=finished.error,
                extra={"fields": {"request_ids": self._request_ids(finished.step)}},
            )
            self._ends_in.fail_step(finished.step, f"{self.role} failed: {finished.error}")

    @abstractmethod
    def _shrink(self, step: S, error: Exception) -> None:
        """The step ran out of memory."""

    @abstractmethod
    def _request_ids(self, step: S) -> list[str]: ...


class DecodeSteps(Steps[DecodeStep]):
    """Each decode step is made before the one that runs has ended."""

    role = "decode"

    def __init__(self, core: DecodeCore, model: WorkerModel, wake: Callable[[], None]) -> None:
        forecast = StepForecast() if model.launch is not None else None
        super().__init__(core, StepThread(model.runner, wake, model.ahead_at_layer, model.launch, forecast))
        self._core = core

    def launch(self, now: float) -> bool:
        launched = False
        while self._thread.wants_next and (step := self._core.schedule(now)) is not None:
            self._thread.submit(step)
            launched = True
        return launched

    def _shrink(self, step: DecodeStep, error: Exception) -> None:
        _log.warning(
            "a decode step of %d sequences ran out of memory, half of them leave: %s",
            step.batch.num_seqs,
            error,
        )
        self._core.shrink_step(step)

    def _request_ids(self, step: DecodeStep) -> list[str]:
        return [sequence.request_id for sequence in step.sequences]


class PrefillSteps(Steps[PrefillStep]):
    """Prefill steps run one after the other; layers leave while they run."""

    role = "prefill"

    def __init__(self, core: PrefillCore, model: WorkerModel, wake: Callable[[], None]) -> None:
        super().__init__(core, StepThread(model.runner, wake, launch=model.launch))
        self._core, self._model, self._wake = core, model, wake
        self._running: deque[RunningStep] = deque()  # the oldest first

    def launch(self, now: float) -> bool:
        if not self._wants_next() or (step := self._core.schedule(now)) is None:
            return False
        running = RunningStep(step, self._core.feed.layer_stride(step), self._model, self._wake)
        self._running.append(running)
        self._thread.submit(step, running.progress.reached)
        return True

    def collect(self, now: float) -> None:
        super().collect(now)
        if self._running and (num_layers := self._running[0].num_layers_to_send()):
            self._core.feed.layers_done(self._running[0].step, num_layers)

    def give_head_start(self) -> bool:
        """Let the step that was just launched begin. Return whether one has ended by then, and gone to the
        core.

        A step needs Python's lock to begin, which what the loop does next would hold.
        """
        if (finished := self._thread.collect(HEAD_START_S)) is None:
            return False
        self._book(finished, time.monotonic())
        return True

    @property
    def pending(self) -> bool:
        """Whether layers are under way on a GPU, which wakes nothing when they are done."""
        return any(running.progress.pending for running in self._running)

    def _wants_next(self) -> bool:
        """A GPU gets the next step before it is through with the last, so that it has no gap, but late, so
        that what arrives until then takes part. On a CPU the gap is nothing beside a step."""
        if self._model.launch is None or not self._running:
            return not self._thread.busy
        return self._thread.wants_next and self._running[-1].is_half_done

    def _book(self, finished: Finished[PrefillStep], now: float) -> None:
        self._running.popleft()
        super()._book(finished, now)

    def _shrink(self, step: PrefillStep, error: Exception) -> None:
        _log.warning(
            "a prefill step of %d tokens ran out of memory, smaller ones follow: %s",
            step.batch.num_tokens,
            error,
        )
        self._core.shrink_step(step, f"prefill ran out of memory: {error}")

    def _request_ids(self, step: PrefillStep) -> list[str]:
        return [chunk.sequence.spec.request_id for chunk in step.chunks]


class RunningStep:
    """A prefill step that has been submitted. Every ``stride`` layers their keys and values leave; 0: not
    before the step has ended. ``wake`` is called when more layers are done."""

    def __init__(self, step: PrefillStep, stride: int, model: WorkerModel, wake: Callable[[], None]) -> None:
        self.step, self._stride = step, stride
        self._half = max(1, model.num_layers // 2)
        half = 0 if model.launch is None else self._half  # of interest where the next step is launched ahead
        self.progress = LayerProgress(model.device, wake, min(filter(None, (stride, half)), default=0))

    @property
    def is_half_done(self) -> bool:
        return self.progress.num_layers() >= self._half

    def num_layers_to_send(self) -> int:
        """Return how many layers' keys and values are final and may leave by now."""
        return self.progress.num_layers() // self._stride * self._stride if self._stride else 0
