"""The steps of a process: scheduled by the cores of its roles, computed by one device, and handed
back to the cores that scheduled them.

A step has a row for each sequence that generates, whose token is due, and behind these chunks of prompts, in
the rest of the token budget (``PrefillScheduler``). So the weights are read once for both. In a process of
one role the other part is empty.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..decode.core import DecodeCore
from ..decode.rows import DecodeStep
from ..engine.errors import DeviceLostError
from ..engine.step.batch import StepOutput
from ..engine.step.step_progress import LayerProgress
from ..engine.step.step_thread import Finished, StepDevice
from ..prefill.chunks import PrefillStep
from ..prefill.core import PrefillCore

HEAD_START_S = 1e-4  # of a step, before its prompts are offered to decode workers
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Sequences:
    """The decode rows of a step."""

    core: DecodeCore
    step: DecodeStep

    @property
    def request_ids(self) -> list[str]:
        return [sequence.request_id for sequence in self.step.members]

    def fail(self, error: Exception, shared: bool) -> None:
        self.core.fail_step(self.step, f"decode failed: {error}", shared)

    def shrink(self, error: Exception) -> None:
        warning = "a decode step of %d sequences ran out of memory, half of them leave: %s"
        _log.warning(warning, len(self.step.members), error)
        self.core.shrink_step(self.step)


@dataclass(slots=True)
class Prompts:
    """The chunks of a step."""

    core: PrefillCore
    step: PrefillStep

    @property
    def request_ids(self) -> list[str]:
        return [chunk.sequence.spec.request_id for chunk in self.step.chunks]

    @property
    def may_shrink(self) -> bool:
        """Whether a step may have fewer of their tokens."""
        return self.step.batch.num_tokens > self.core.scheduler.block_size

    def fail(self, error: Exception, shared: bool) -> None:
        self.core.fail_step(self.step, f"prefill failed: {error}", shared)

    def shrink(self, error: Exception) -> None:
        warning = "a step with %d prompt tokens ran out of memory, smaller ones follow: %s"
        _log.warning(warning, self.step.batch.num_tokens, error)
        self.core.shrink_step(self.step, f"prefill ran out of memory: {error}")


class RunningStep:
    """A step that has been submitted: sequences that generate, prompts, or both.

    Every ``stride`` layers the keys and values of its prompts leave; 0: not before the step has ended."""

    def __init__(
        self,
        sequences: Sequences | None,
        prompts: Prompts | None,
        stride: int,
        half: int,
        progress: LayerProgress,
    ) -> None:
        """``half``: the number of layers at which the step is half done."""
        self.sequences, self.prompts, self.stride = sequences, prompts, stride
        self._half, self.progress = half, progress
        if sequences is None:
            assert prompts is not None, "an empty step"
            self.batch = prompts.step.batch
        elif prompts is None:
            self.batch = sequences.step.batch
        else:
            self.batch = sequences.step.batch.followed_by(prompts.step.batch)

    @property
    def is_half_done(self) -> bool:
        return self.progress.num_layers() >= self._half

    def num_layers_to_send(self) -> int:
        """Return how many layers' keys and values are final and may leave by now."""
        return self.progress.num_layers() // self.stride * self.stride if self.stride else 0

    def complete(self, output: StepOutput, now: float) -> None:
        """Hand the output to the cores, to each its own rows."""
        sequences, prompts = self.sequences, self.prompts
        if prompts is not None:
            of_prompts = output
            if sequences is not None:
                output, of_prompts = output.split(len(sequences.step.sequences))
            prompts.core.complete(prompts.step, of_prompts, now)
        if sequences is not None:
            sequences.core.complete(sequences.step, output, now)

    def skip(self) -> None:
        """The step has not run."""
        if self.prompts is not None:
            self.prompts.core.scheduler.skip(self.prompts.step)
        if self.sequences is not None:
            self.sequences.core.scheduler.skip(self.sequences.step)

    def shrink(self, error: Exception) -> None:
        """The step ran out of memory. Of both parts that of the prompts shrinks, if it can."""
        if self.sequences is None or self.prompts is None:
            for part in (self.sequences, self.prompts):
                if part is not None:
                    part.shrink(error)
        elif self.prompts.may_shrink:
            self.prompts.shrink(error)
            self.sequences.core.scheduler.skip(self.sequences.step)
        else:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """The step raised. Where it had both parts, each is tried without the other, and the prompts one by
        one."""
        parts = [part for part in (self.sequences, self.prompts) if part is not None]
        _log.error(
            "a step of %d requests failed; one alone in its step goes back to the coordinator, several are "
            "tried apart",
            self.batch.num_seqs,
            exc_info=error,
            extra={"fields": {"request_ids": [name for part in parts for name in part.request_ids]}},
        )
        for part in parts:
            part.fail(error, shared=len(parts) == 2)


class Steps:
    """All steps of a process."""

    def __init__(
        self,
        device: StepDevice[RunningStep],
        num_layers: int,
        progress: Callable[[int], LayerProgress],
        clock: Callable[[], float],
        launches: bool,
    ) -> None:
        """``progress``: returns the progress of a step on this device, reported after each group of this many
        layers (see ``LayerProgress``). ``launches``: whether the device begins a step that is submitted
        behind another by itself, as a GPU does."""
        self._device, self._clock, self._launches = device, clock, launches
        self._progress, self._no_progress = progress, progress(0)
        self._half = max(1, num_layers // 2)
        self._decode: DecodeCore | None = None
        self._prefill: PrefillCore | None = None
        self._running: deque[RunningStep] = deque()  # the oldest first
        self._had_sequences = False  # the newest of them

    def add(self, core: PrefillCore | DecodeCore) -> None:
        """Compute what this core schedules, too."""
        if isinstance(core, PrefillCore):
            self._prefill = core
        else:
            self._decode = core

    def remove(self, core: PrefillCore | DecodeCore) -> None:
        """Make no more steps of this core."""
        if core is self._prefill:
            self._prefill = None
        if core is self._decode:
            self._decode = None

    def launch(self, now: float) -> bool:
        """Submit the steps that the device wants by now. Return whether a step has ended meanwhile, and gone
        to its cores."""
        ended, running, device = False, self._running, self._device
        while device.wants_next and not (running and running[-1].prompts is not None and self._is_early()):
            if (step := self._make(now)) is None:
                break
            self._had_sequences = step.sequences is not None
            running.append(step)
            if step.prompts is None:
                device.submit(step)
            else:
                device.submit(step, step.progress.reached)
                ended = (len(running) == 1 and self._give_head_start()) or ended
        return ended

    def collect(self, now: float) -> None:
        """Hand steps that are over to their cores. Raises DeviceLostError."""
        while (finished := self._device.collect()) is not None:
            self._book(finished, now)
        prompts = self._running[0].prompts if self._running else None
        if prompts is not None and (num_layers := self._running[0].num_layers_to_send()):
            prompts.core.feed.layers_done(prompts.step, num_layers)

    @property
    def pending(self) -> bool:
        """Whether ``collect`` must be called soon, though nothing wakes the loop: layers are under way on a
        GPU."""
        return self._launches and any(running.progress.pending for running in self._running)

    @property
    def oldest(self) -> object | None:
        """The running step that was submitted first. May be read from any thread."""
        try:
            return self._running[0]
        except IndexError:
            return None

    @property
    def busy_seconds(self) -> float:
        """Seconds in which a step has run so far."""
        return self._device.busy_seconds

    def stop(self) -> None:
        """End the device's threads."""
        self._device.stop()

    def _make(self, now: float) -> RunningStep | None:
        """Return the next step. None: there is nothing to compute, or its sequences wait for the running
        step.

        A prompt that is tried apart has steps of its own, between those of the sequences."""
        rows, prompts, prefill, num_rows = None, None, self._prefill, 0
        if self._had_sequences and prefill is not None and prefill.scheduler.tries_apart:
            prompts = prefill.schedule(now)
        if prompts is None and self._decode is not None:
            sequences = self._decode.schedule(now)
            if sequences is not None:
                rows, num_rows = Sequences(self._decode, sequences), len(sequences.sequences)
            elif self._decode.scheduler.in_step:
                return None
        if prompts is None and prefill is not None and not (rows is not None and rows.step.alone):
            prompts = prefill.schedule(now, num_rows)
        if prompts is None or prefill is None:
            return None if rows is None else RunningStep(rows, None, 0, self._half, self._no_progress)
        stride = prefill.feed.layer_stride(prompts)
        half = self._half if self._launches else 0  # of interest where the next step is launched ahead
        progress = self._progress(min(filter(None, (stride, half)), default=0))
        return RunningStep(rows, Prompts(prefill, prompts), stride, self._half, progress)

    def _is_early(self) -> bool:
        """Whether to make the next step later, behind a step with prompts, so that what arrives until then
        takes part. Sequences are to have no gap. A GPU has none between steps of prompts either; on a CPU it
        is nothing beside such a step, and the next one is made when the last one has ended."""
        newest = self._running[-1]
        if self._launches:
            return not newest.is_half_done
        return newest.sequences is None and self._device.busy

    def _give_head_start(self) -> bool:
        """Let the step that was just launched begin. Return whether one has ended by then, and gone to its
        cores.

        A step needs Python's lock to begin, which the loop's next turn would hold.
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
