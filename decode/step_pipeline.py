"""From the core to the step thread and back: each decode step is made before the one that runs has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..engine.errors import DeviceLostError
from ..engine.step.step_forecast import StepForecast
from ..engine.step.step_thread import Finished, StepThread
from ..engine.worker_model import WorkerModel
from .core import DecodeCore
from .rows import DecodeStep

_log = logging.getLogger(__name__)


class StepPipeline:
    """``wake`` is called from the step thread: a step has run, or the next one is wanted."""

    def __init__(self, core: DecodeCore, model: WorkerModel, wake: Callable[[], None]) -> None:
        self._core = core
        forecast = StepForecast() if model.launch is not None else None
        self._thread: StepThread[DecodeStep] = StepThread(model.runner, wake, model.ahead_at_layer, model.launch, forecast)

    def collect(self, now: float) -> None:
        """What has run goes to the core. Raises DeviceLostError."""
        while (finished := self._thread.collect()) is not None:
            self._book(finished, now)

    def launch(self, now: float) -> None:
        """The core's next steps, as many as the thread wants by now."""
        while self._thread.wants_next and (step := self._core.schedule(now)) is not None:
            self._thread.submit(step)

    @property
    def busy_seconds(self) -> float:
        """See ``StepThread``."""
        return self._thread.busy_seconds

    def stop(self) -> None:
        """Ends the thread."""
        self._thread.stop()

    def _book(self, finished: Finished[DecodeStep], now: float) -> None:
        if finished.output is not None:
            self._core.complete(finished.step, finished.output, now)
        elif finished.error is None:
            self._core.skip_step(finished.step)
        elif isinstance(finished.error, DeviceLostError):  # no request's fault: all of them go on elsewhere
            raise finished.error
        elif finished.out_of_memory:
            _log.warning(
                "a decode step of %d sequences ran out of memory, half of them leave: %s", finished.step.batch.num_seqs, finished.error
            )
            self._core.shrink_step(finished.step)
        else:
            named = {"request_ids": [sequence.request_id for sequence in finished.step.sequences]}
            said = "a decode step of %d sequences failed; who is alone in one goes back to the coordinator, several are tried apart"
            _log.error(said, finished.step.batch.num_seqs, exc_info=finished.error, extra={"fields": named})
            self._core.fail_step(finished.step, f"decode failed: {finished.error}")
