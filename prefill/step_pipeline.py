"""From the core to the step thread and back: prefill steps one after the other, layers that leave while they run."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from ..engine.errors import DeviceLostError
from ..engine.step.step_thread import Finished, StepThread
from ..engine.worker_model import WorkerModel
from .core import PrefillCore
from .running_step import RunningStep
from .scheduler import PrefillStep

HEAD_START_S = 1e-4  # of a step, before its prompts are offered to decode workers
_log = logging.getLogger(__name__)


class StepPipeline:
    """``wake`` is called from the step thread: a step has run, layers may leave, or the next step is wanted."""

    def __init__(self, core: PrefillCore, model: WorkerModel, wake: Callable[[], None]) -> None:
        self._core, self._model, self._wake = core, model, wake
        self._thread: StepThread[PrefillStep] = StepThread(model.runner, wake, launch=model.launch)
        self._running: deque[RunningStep] = deque()  # the oldest first

    @property
    def pending(self) -> bool:
        """Whether layers are under way on a GPU, which wakes nobody when they are done: then ``collect`` is to be called soon."""
        return any(running.progress.pending for running in self._running)

    def collect(self, now: float) -> None:
        """What has run goes to the core, and which layers have. Raises DeviceLostError."""
        while (finished := self._thread.collect()) is not None:
            self._book(finished, now)
        if self._running and (num_layers := self._running[0].num_layers_to_send()):
            self._core.feed.layers_done(self._running[0].step, num_layers)

    def launch(self, now: float) -> bool:
        """The core's next step, if one is wanted by now. Whether it has begun."""
        if not self._wants_next() or (step := self._core.schedule(now)) is None:
            return False
        running = RunningStep(step, self._core.feed.layer_stride(step), self._model, self._wake)
        self._running.append(running)
        self._thread.submit(step, running.progress.reached)
        return True

    def give_head_start(self) -> bool:
        """A step needs Python's lock to begin, and what the loop does next would hold it. Whether one is over by then: it has gone to the
        core."""
        if (finished := self._thread.collect(HEAD_START_S)) is None:
            return False
        self._book(finished, time.monotonic())
        return True

    @property
    def busy_seconds(self) -> float:
        """See ``StepThread``."""
        return self._thread.busy_seconds

    def stop(self) -> None:
        """Ends the thread."""
        self._thread.stop()

    def _wants_next(self) -> bool:
        """A GPU gets the next one before it is through with the last, so that it has no gap, but late: what arrives until then takes
        part. On a CPU the gap is nothing beside a step."""
        if self._model.launch is None or not self._running:
            return not self._thread.busy
        return self._thread.wants_next and self._running[-1].is_half_done

    def _book(self, finished: Finished[PrefillStep], now: float) -> None:
        self._running.popleft()
        if finished.output is not None:
            self._core.complete(finished.step, finished.output, now)
        elif finished.error is None:
            self._core.skip_step(finished.step)
        elif isinstance(finished.error, DeviceLostError):  # no request's fault: all of them go on elsewhere
            raise finished.error
        elif finished.out_of_memory:
            _log.warning(
                "a prefill step of %d tokens ran out of memory, smaller ones follow: %s", finished.step.batch.num_tokens, finished.error
            )
            self._core.shrink_step(finished.step, f"prefill ran out of memory: {finished.error}")
        else:
            named = {"request_ids": [chunk.sequence.spec.request_id for chunk in finished.step.chunks]}
            said = "a prefill step of %d prompts failed; who is alone in one goes back to the coordinator, several are tried apart"
            _log.error(said, finished.step.batch.num_seqs, exc_info=finished.error, extra={"fields": named})
            self._core.fail_step(finished.step, f"prefill failed: {finished.error}")
