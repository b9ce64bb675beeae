"""One device under virtual time: it takes the steps of ``worker/steps.py``, and a latency profile's time for
each. The next step is made when the last one has ended."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from ...engine.latency_profile import StepRole
from ...engine.step.batch import StepOutput
from ...engine.step.step_thread import Finished, OnLayer
from ...engine.step_clock import StepClock
from ...worker.steps import RunningStep
from .events import EventQueue
from .host import Host, HostedStep
from .tallies import Distribution


@dataclass(slots=True)
class LeavingLayers:
    """The layers of a running prefill step, which become final one after the other. Looked at every
    ``stride`` layers: times are in seconds of the virtual clock."""

    step: RunningStep
    made_at: float
    loop_s: float  # from then on, before the first layer
    seconds: float  # that all layers take
    stride: int
    num_layers: int
    awaited: int = 0  # number of final layers at the next look

    def time_of(self, num_layers: int) -> float:
        """Return the time at which this number of layers is final."""
        return self.made_at + (self.loop_s + self.seconds * num_layers / self.num_layers)

    def num_done(self, now: float) -> int:
        """How many were final at the last look that a worker would have had by now: a multiple of the
        stride."""
        share = (now - self.made_at - self.loop_s) / self.seconds if self.seconds else 1.0
        done = max(0, int(share * self.num_layers / self.stride) + 1) * self.stride
        while done > 0 and (done >= self.num_layers or self.time_of(done) > now):
            done -= self.stride
        return done

    def await_layers(self, wanted: int, num_seen: int) -> int:
        """The first look after the one at ``num_seen`` layers at which ``wanted`` are final; 0: there is none
        before the end, or it is awaited already."""
        looks = max(-(-wanted // self.stride), num_seen // self.stride + 1)
        before, self.awaited = self.awaited, looks * self.stride
        return self.awaited if before != self.awaited < self.num_layers else 0

    def ending_at(self, ends_at: float, now: float) -> LeavingLayers:
        """The same layers, where what is left of them takes until then, evenly."""
        left = 1.0 - (now - self.made_at - self.loop_s) / self.seconds if self.seconds else 0.0
        if left <= 0:
            return self
        seconds = (ends_at - now) / left
        return replace(self, made_at=ends_at - seconds, loop_s=0.0, seconds=seconds)


Pace: TypeAlias = Callable[[StepRole, float], float]
"""How many times its modelled time a step takes that begins then (seconds of the simulation)."""


class Noise:
    """How many times its modelled time each step of one machine takes. ``seed``: of its own, so that it is
    the same whatever other machines do meanwhile."""

    def __init__(self, seed: str, noise_cv: float) -> None:
        self._draw = random.Random(seed)
        self._sigma = math.sqrt(math.log1p(noise_cv**2))

    def next(self) -> float:
        """The factor of the step that begins now."""
        return math.exp(self._draw.gauss(0.0, 1.0) * self._sigma - self._sigma**2 / 2) if self._sigma else 1.0


class Device:
    """See ``StepDevice``. ``host``: that it shares with others whose steps slow its own down. ``pace``: in
    place of noise. ``jumps``: time passes over layers and heartbeats that nobody waits for."""

    def __init__(
        self,
        queue: EventQueue,
        clock: StepClock,
        noise: Noise,
        gaps: Distribution,
        jumps: bool = True,
        host: Host | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._queue, self._clock, self._noise, self._gaps = queue, clock, noise, gaps
        self._host, self._pace = host, pace
        self._hosted: HostedStep | None = None  # the running step there
        self.may_jump = jumps and pace is None
        self.wake: Callable[[], None]  # has the worker's loop turn; set by its process
        self._running: RunningStep | None = None
        self._finished: RunningStep | None = None  # to be collected
        self._layers: LeavingLayers | None = None  # of the running step, where some leave before its end
        self._decoded_at, self._num_decoded = 0.0, 0  # the last decode step's end, and its sequences
        self.busy_seconds = 0.0
        self.prefill_s = self.decode_s = 0.0  # of that, in steps with prompts, and in steps without
        self.num_steps = 0

    # --- what the worker's steps call ------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return self._running is not None or self._finished is not None

    @property
    def wants_next(self) -> bool:
        return self._running is None and self._finished is None

    def submit(self, step: RunningStep, on_layer: OnLayer | None = None) -> None:
        self._running = step
        prompts, sequences = step.prompts, step.sequences
        if sequences is None or self._queue.now > self._decoded_at:
            self._num_decoded = 0  # no sequence has waited since then
        seconds, profile = self._seconds(step), self._clock.profile
        loop_s = profile.prefill_loop_s if sequences is None else profile.decode_loop_s
        self.num_steps += 1
        self._add(step, seconds)
        if step.stride:
            self._layers = LeavingLayers(
                step, self._queue.now, loop_s, seconds, step.stride, profile.memory.num_layers
            )
        if self._host is None:
            self._queue.after(loop_s + seconds, self._done, step)
        else:
            contention = profile.contention
            assert contention is not None, "else no step slows it"
            role: StepRole = "decode" if prompts is None else "prefill"
            self._hosted = self._host.begin(
                role, contention, loop_s, seconds, partial(self._moved, step), partial(self._done, step)
            )

    def collect(self, patience_s: float = 0.0) -> Finished[RunningStep] | None:
        step, self._finished = self._finished, None
        return None if step is None else Finished(step, output_of(num_rows_of(step)), None)

    def stop(self) -> None:
        """End the running step: its process has ended."""
        if self._host is not None and self._hosted is not None:
            self._host.stop(self._hosted)
        self._running = self._layers = None

    # --- layers that leave while a step runs -----------------------------------------------------

    def report_layers(self) -> None:
        """Report to the running step how many of its layers are final."""
        if self._layers is not None and (num_layers := self._layers.num_done(self._queue.now)):
            self._layers.step.progress.reached(num_layers)

    def await_layers(self) -> None:
        """Look at the running step's layers again when some of them leave, as things are now."""
        if (layers := self._layers) is None:
            return
        prompts = layers.step.prompts
        assert prompts is not None, "of a step with prompts"
        wanted = prompts.core.feed.next_slice(prompts.step) if self.may_jump else 0
        num_seen = layers.step.progress.num_layers()
        if wanted is not None and (num_layers := layers.await_layers(wanted, num_seen)):
            self._queue.at(layers.time_of(num_layers), self._layers_done, layers, num_layers)

    def _layers_done(self, layers: LeavingLayers, num_layers: int) -> None:
        """Nothing but layers that leave is a reason for a turn of the loop."""
        prompts = layers.step.prompts
        if self._layers is not layers or layers.awaited != num_layers or prompts is None:
            return
        layers.step.progress.reached(num_layers)
        prompts.core.feed.layers_done(prompts.step, num_layers)
        if prompts.core.has_actions:
            self.wake()
        else:
            self.await_layers()

    def _moved(self, step: RunningStep, ends_at: float, by_s: float) -> None:
        """The running step ends then, ``by_s`` later than before: its layers are final later, too."""
        self._add(step, by_s)
        if (before := self._layers) is None:
            return
        self._layers = layers = before.ending_at(ends_at, self._queue.now)
        if layers is not before and 0 < layers.awaited < layers.num_layers:
            self._queue.at(layers.time_of(layers.awaited), self._layers_done, layers, layers.awaited)

    # --- time ------------------------------------------------------------------------------------

    def _add(self, step: RunningStep, seconds: float) -> None:
        self.busy_seconds += seconds
        if step.prompts is None:
            self.decode_s += seconds
        else:
            self.prefill_s += seconds

    def _seconds(self, step: RunningStep) -> float:
        prompts, sequences = step.prompts, step.sequences
        chunks = [(c.start, c.count) for c in prompts.step.chunks] if prompts is not None else []
        num_seqs = len(sequences.step.sequences) if sequences is not None else 0
        context = int(sequences.step.batch.seq_lens.sum()) if sequences is not None else 0
        seconds = self._clock.mixed(chunks, num_seqs, context)
        if self._pace is not None:
            return seconds * self._pace("decode" if prompts is None else "prefill", self._queue.now)
        return seconds * self._noise.next()

    def _done(self, step: RunningStep) -> None:
        if self._running is not step:
            return
        self._finished, self._running, self._layers = step, None, None
        self._count_gaps(step)
        self.wake()

    def _count_gaps(self, step: RunningStep) -> None:
        """Count the time between the ends of two decode steps, of which the later began with the end of the
        earlier, once for each sequence in both."""
        now = self._queue.now
        if step.sequences is not None:
            num_seqs = len(step.sequences.step.sequences)
            if both := min(self._num_decoded, num_seqs):
                self._gaps.add(now - self._decoded_at, both)
            self._decoded_at, self._num_decoded = now, num_seqs


def num_rows_of(step: RunningStep) -> int:
    """Return the number of sequences and chunks in a step."""
    num_rows = len(step.sequences.step.sequences) if step.sequences is not None else 0
    return num_rows + (len(step.prompts.step.chunks) if step.prompts is not None else 0)


def output_of(num_rows: int) -> StepOutput:
    """Every token is 0: no simulated request ends but by its length."""
    return StepOutput(np.zeros(num_rows, np.int32))
