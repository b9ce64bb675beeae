"""The steps of a process: made of what the cores of its roles schedule, computed by one device, and handed
back to the core that scheduled them.

The device is given by the process (see ``StepDevice``): live it is a step thread around the model.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from ..decode.core import DecodeCore
from ..decode.rows import DecodeStep
from ..engine.errors import DeviceLostError
from ..engine.step.batch import Batch, StepOutput
from ..engine.step.step_progress import LayerProgress
from ..engine.step.step_thread import Finished, StepDevice
from ..prefill.core import PrefillCore
from ..prefill.scheduler import PrefillStep

HEAD_START_S = 1e-4  # of a step, before its prompts are offered to decode workers
_log = logging.getLogger(__name__)


class RunningStep:
    """A step that has been submitted, and the core that scheduled it.

    Every ``stride`` layers the keys and values of its prompts leave; 0: not before the step has ended."""

    def __init__(
        self,
        core: PrefillCore | DecodeCore,
        step: PrefillStep | DecodeStep,
        stride: int,
        half: int,
        progress: LayerProgress,
    ) -> None:
        """``half``: the number of layers at which the step is half done."""
        self.core, self.step, self._stride = core, step, stride
        self._half, self.progress = half, progress

    @property
    def batch(self) -> Batch:
        """See ``Step``."""
        return self.step.batch

    @property
    def has_prompts(self) -> bool:
        return isinstance(self.step, PrefillStep)

    @property
    def is_half_done(self) -> bool:
        return self.progress.num_layers() >= self._half

    def num_layers_to_send(self) -> int:
        """Return how many layers' keys and values are final and may leave by now."""
        return self.progress.num_layers() // self._stride * self._stride if self._stride else 0

    def complete(self, output: StepOutput, now: float) -> None:
        """Hand the output to the core."""
        self.core.complete(self.step, output, now)  # type: ignore[arg-type]  # its own

    def skip(self) -> None:
        """Tell the core that the step has not run."""
        self.core.skip_step(self.step)  # type: ignore[arg-type]

    def fail(self, error: Exception) -> None:
        """Tell the core that the step raised."""
        role = "prefill" if self.has_prompts else "decode"
        _log.error(
            "a %s step of %d requests failed; one alone in its step goes back to the coordinator, several "
            "are tried apart",
            role,
            self.batch.num_seqs,
            exc_info=error,
            extra={"fields": {"request_ids": self._request_ids()}},
        )
        self.core.fail_step(self.step, f"{role} failed: {error}")  # type: ignore[arg-type]

    def shrink(self, error: Exception) -> None:
        """Tell the core that the step ran out of memory."""
        if isinstance(self.core, PrefillCore):
            assert isinstance(self.step, PrefillStep)
            _log.warning(
                "a prefill step of %d tokens ran out of memory, smaller ones follow: %s",
                self.batch.num_tokens,
                error,
            )
            self.core.shrink_step(self.step, f"prefill ran out of memory: {error}")
        else:
            assert isinstance(self.step, DecodeStep)
            _log.warning(
                "a decode step of %d sequences ran out of memory, half of them leave: %s",
                self.batch.num_seqs,
                error,
            )
            self.core.shrink_step(self.step)

    def _request_ids(self) -> list[str]:
        if isinstance(self.step, PrefillStep):
            return [chunk.sequence.spec.request_id for chunk in self.step.chunks]
        return [sequence.request_id for sequence in self.step.sequences]


class Steps:
    """All steps of a process. The steps of two roles alternate, so that neither waits for more than one."""

    def __init__(
        self,
        device: StepDevice[RunningStep],
        num_layers: int,
        progress: Callable[[int], LayerProgress],
        clock: Callable[[], float],
        launches: bool,
    ) -> None:
        """``progress``: returns the progress of a step on this device, reported after each group of this many
        layers (see ``LayerProgress``). ``launches``: whether the device begins a step that is submitted behind
        another by itself, as a GPU does."""
        self._device, self._clock, self._launches = device, clock, launches
        self._progress, self._half = progress, max(1, num_layers // 2)
        self._cores: list[PrefillCore | DecodeCore] = []  # the one whose turn it is first
        self._running: deque[RunningStep] = deque()  # the oldest first

    def add(self, core: PrefillCore | DecodeCore) -> None:
        """Compute what this core schedules, too."""
        self._cores.append(core)

    def remove(self, core: PrefillCore | DecodeCore) -> None:
        """Make no more steps of this core."""
        self._cores.remove(core)

    def launch(self, now: float) -> bool:
        """Submit the steps that the device wants by now. Return whether a step has ended meanwhile, and gone
        to its core."""
        ended = False
        while self._wants_next() and (running := self._make(now)) is not None:
            self._running.append(running)
            self._device.submit(running, running.progress.reached if running.has_prompts else None)
            ended = (running.has_prompts and self._give_head_start()) or ended
        return ended

    def collect(self, now: float) -> None:
        """Hand steps that are over to their cores. Raises DeviceLostError."""
        while (finished := self._device.collect()) is not None:
            self._book(finished, now)
        if self._running and (num_layers := self._running[0].num_layers_to_send()):
            running = self._running[0]
            assert isinstance(running.core, PrefillCore)
            assert isinstance(running.step, PrefillStep)
            running.core.feed.layers_done(running.step, num_layers)

    @property
    def pending(self) -> bool:
        """Whether ``collect`` must be called soon, though nothing wakes the loop: layers are under way on a
        GPU."""
        return any(running.progress.pending for running in self._running)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which a step has run so far."""
        return self._device.busy_seconds

    def stop(self) -> None:
        """End the device's threads."""
        self._device.stop()

    def _make(self, now: float) -> RunningStep | None:
        for core in self._cores:
            if (step := core.schedule(now)) is not None:
                self._cores.remove(core)
                self._cores.append(core)
                stride = 0
                if isinstance(core, PrefillCore):
                    assert isinstance(step, PrefillStep)
                    stride = core.feed.layer_stride(step)
                half = (
                    self._half if self._launches else 0
                )  # of interest where the next step is launched ahead
                every = min(filter(None, (stride, half)), default=0)
                return RunningStep(core, step, stride, self._half, self._progress(every))
        return None

    def _wants_next(self) -> bool:
        """Behind a step with prompts a GPU gets the next one before it is through with it, so that it has no
        gap, but late, so that what arrives until then takes part. On a CPU the gap is nothing beside a
        step."""
        if not self._running or not self._running[-1].has_prompts:
            return self._device.wants_next
        if not self._launches:
            return not self._device.busy
        return self._device.wants_next and self._running[-1].is_half_done

    def _give_head_start(self) -> bool:
        """Let the step that was just launched begin. Return whether one has ended by then, and gone to its
        core.

        A step needs Python's lock to begin, which what the loop does next would hold.
        """
        if (finished := self._device.collect(HEAD_START_S)) is None:
            return False
        self._book(finished, self._clock())
        return True

    def _book(self, finished: Finished[RunningStep], now: float) -> None:
        running = self._running.popleft()
        assert running is finished.step, "steps end in the order in which they were submitted"
        if finished.output is not None:
            running.complete(finished.output, now)
        elif finished.error is None:
            running.skip()
        elif isinstance(finished.error, DeviceLostError):  # no request's fault: all of them go on elsewhere
            raise finished.error
        elif finished.out_of_memory:
            running.shrink(finished.error)
        else:
            running.fail(finished.error)
