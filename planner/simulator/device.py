"""One device under virtual time: it runs one step at a time, of one worker or of the two that share it.

A step of two workers has the sequences of one and prompts of the other in the rest of the budget, as in
``worker/steps.py``. It is made when the last one has ended."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from ...decode.core import DecodeCore
from ...decode.rows import DecodeStep
from ...engine.latency_profile import StepClock, StepRole
from ...engine.step.batch import StepOutput
from ...prefill.core import PrefillCore
from ...prefill.scheduler import PrefillStep
from .events import EventQueue
from .host import Host, HostedStep
from .tallies import Distribution

Pace: TypeAlias = Callable[[StepRole, float], float]
"""How many times its modelled time a step takes that begins then (seconds of the simulation)."""


class PrefillSide(Protocol):
    """The prefill worker on a device, as the device sees it."""

    core: PrefillCore
    rests: bool

    def rouse(self) -> None:
        """It does not rest any more."""

    def schedule(self, now: float, num_decode_rows: int) -> PrefillStep | None:
        """Its next step, beside this many sequences."""

    def begin(self, step: PrefillStep, loop_s: float, seconds: float) -> None:
        """The step runs from ``loop_s`` from now on, for ``seconds``."""

    def moved(self, ends_at: float) -> None:
        """The running step ends then."""

    def complete(self, step: PrefillStep, output: StepOutput) -> None:
        """It is over."""

    def turn(self) -> None:
        """One turn of the worker's loop."""


class DecodeSide(Protocol):
    """The decode worker on a device, as the device sees it."""

    core: DecodeCore
    rests: bool

    def rouse(self) -> None:
        """It does not rest any more."""

    @property
    def num_growing_blocks(self) -> int:
        """What prompts that are computed here too are to leave to it."""

    def schedule(self, now: float) -> DecodeStep | None:
        """Its next step."""

    def complete(self, step: DecodeStep, output: StepOutput) -> None:
        """It is over."""

    def turn(self) -> None:
        """One turn of the worker's loop."""


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
    """``host``: that it shares with others whose steps slow its own down. ``pace``: in place of noise.
    ``jumps``: time passes over layers and heartbeats that nobody waits for."""

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
        self.jumps = jumps and pace is None
        self._decoded_at, self._num_decoded = (
            0.0,
            0,
        )  # the last decode step's end, and how many sequences may be in the next one
        self.prefill: PrefillSide | None = None
        self.decode: DecodeSide | None = None
        self.busy = False
        self.busy_s = 0.0
        self.prefill_s = self.decode_s = 0.0  # of that, in steps with prompts, and in steps without
        self.num_steps = 0

    def wake(self) -> None:
        """Make and begin the next step, if none is running and there is one."""
        if self.busy:
            return
        now = self._queue.now
        sequences = self.decode.schedule(now) if self.decode is not None else None
        if sequences is None:
            self._num_decoded = 0
        num_rows = len(sequences.sequences) if sequences is not None else 0
        prompts = self.prefill.schedule(now, num_rows) if self.prefill is not None else None
        if prompts is not None or sequences is not None:
            self._begin(prompts, sequences)

    @property
    def rests(self) -> bool:
        """Nothing is computed here, and nothing kept for anybody: until a message comes, nothing changes."""
        return not self.busy and all(
            side.core.at_rest for side in (self.prefill, self.decode) if side is not None
        )

    @property
    def num_growing_blocks(self) -> int:
        """What prompts that are computed here are to leave to the sequences that run here."""
        return self.decode.num_growing_blocks if self.decode is not None else 0

    def rouse(self) -> None:
        """Something comes to one of the workers here."""
        for side in (self.prefill, self.decode):
            if side is not None and side.rests:
                side.rouse()

    def stop(self) -> None:
        """Its machine has failed."""
        if self._host is not None and self._hosted is not None:
            self._host.stop(self._hosted)
        self.prefill, self.decode = None, None

    def let_go(self, worker: object) -> None:
        """It runs no steps here any more."""
        if self.prefill is worker:
            self.prefill = None
        if self.decode is worker:
            self.decode = None

    def _begin(self, prompts: PrefillStep | None, sequences: DecodeStep | None) -> None:
        self.busy = True
        seconds = self._seconds(prompts, sequences)
        loop_s = (
            self._clock.profile.prefill_loop_s if sequences is None else self._clock.profile.decode_loop_s
        )
        self.busy_s += seconds
        self.num_steps += 1
        if prompts is not None:
            assert self.prefill is not None
            self.prefill_s += seconds
            self.prefill.begin(prompts, loop_s, seconds)
        else:
            self.decode_s += seconds
        if self._host is None:
            self._queue.after(loop_s + seconds, self._done, prompts, sequences)
        else:
            self._begin_beside_others(self._host, prompts, sequences, loop_s, seconds)

    def _begin_beside_others(
        self,
        host: Host,
        prompts: PrefillStep | None,
        sequences: DecodeStep | None,
        loop_s: float,
        seconds: float,
    ) -> None:
        contention = self._clock.profile.contention
        assert contention is not None, "else nobody slows it"

        def moved(ends_at: float, by_s: float) -> None:
            self.busy_s += by_s
            if prompts is None:
                self.decode_s += by_s
            else:
                self.prefill_s += by_s
                if self.prefill is not None:
                    self.prefill.moved(ends_at)

        role: StepRole = "decode" if prompts is None else "prefill"
        self._hosted = host.begin(
            role, contention, loop_s, seconds, moved, lambda: self._done(prompts, sequences)
        )

    def _seconds(self, prompts: PrefillStep | None, sequences: DecodeStep | None) -> float:
        chunks = [(c.start, c.count) for c in prompts.chunks] if prompts is not None else []
        num_seqs = len(sequences.sequences) if sequences is not None else 0
        context = int(sequences.batch.seq_lens.sum()) if sequences is not None else 0
        seconds = self._clock.mixed(chunks, num_seqs, context)
        if self._pace is not None:
            return seconds * self._pace("decode" if prompts is None else "prefill", self._queue.now)
        return seconds * self._noise.next()

    def _done(self, prompts: PrefillStep | None, sequences: DecodeStep | None) -> None:
        self.busy = False
        if prompts is not None and self.prefill is not None:
            self.prefill.complete(prompts, output_of(len(prompts.chunks)))
        if sequences is not None and self.decode is not None:
            both = min(self._num_decoded, len(sequences.sequences))
            if both:
                self._gaps.add(self._queue.now - self._decoded_at, both)
            self._decoded_at, self._num_decoded = self._queue.now, len(sequences.sequences)
            self.decode.complete(sequences, output_of(len(sequences.sequences)))
        self._turn()

    def _turn(self) -> None:
        if self.prefill is not None:
            self.prefill.turn()
        if self.decode is not None:
            self.decode.turn()


def output_of(num_rows: int) -> StepOutput:
    """Every token is 0: no simulated request ends but by its length."""
    return StepOutput(np.zeros(num_rows, np.int32))
