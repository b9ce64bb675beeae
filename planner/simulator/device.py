"""One device under virtual time: it runs one step at a time, of one worker or of the two that share it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...decode.rows import DecodeStep
from ...engine.batch import StepOutput
from ...engine.latency_profile import StepClock
from ...prefill.scheduler import PrefillStep
from .events import EventQueue
from .tallies import Distribution

if TYPE_CHECKING:
    from .decode_shell import DecodeShell
    from .prefill_shell import PrefillShell


class Device:
    """``noise``: draws from a standard normal distribution. A step of two workers is one step over the chunks and the sequences of both."""

    def __init__(self, queue: EventQueue, clock: StepClock, noise: Callable[[], float], gaps: Distribution) -> None:
        self._queue, self._clock, self._noise, self._gaps = queue, clock, noise, gaps
        self._decoded_at, self._num_decoded = 0.0, 0  # the last decode step's end, and how many sequences may be in the next one
        profile = clock.profile
        self._sigma = math.sqrt(math.log1p(profile.noise_cv**2))
        self.prefill: PrefillShell | None = None
        self.decode: DecodeShell | None = None
        self.busy = False
        self.busy_s = 0.0
        self.prefill_s = self.decode_s = 0.0  # of that, in steps with prompts, and in steps without
        self.num_steps = 0

    def wake(self) -> None:
        """Begins a step, if none is running and there is one."""
        if self.busy:
            return
        now = self._queue.now
        prompts = self.prefill.schedule(now) if self.prefill is not None else None
        sequences = self.decode.schedule(now) if self.decode is not None else None
        if sequences is None:
            self._num_decoded = 0
        if prompts is None and sequences is None:
            return
        self.busy = True
        seconds = self._seconds(prompts, sequences)
        loop_s = self._clock.profile.prefill_loop_s if sequences is None else self._clock.profile.decode_loop_s
        self.busy_s += seconds
        self.num_steps += 1
        if prompts is not None:
            assert self.prefill is not None
            self.prefill_s += seconds
            self.prefill.begin(prompts, loop_s, seconds)
        else:
            self.decode_s += seconds
        self._queue.after(loop_s + seconds, self._done, prompts, sequences)

    def _seconds(self, prompts: PrefillStep | None, sequences: DecodeStep | None) -> float:
        chunks = [(c.start, c.count) for c in prompts.chunks] if prompts is not None else []
        num_seqs = len(sequences.sequences) if sequences is not None else 0
        context = int(sequences.batch.seq_lens.sum()) if sequences is not None else 0
        seconds = self._clock.mixed(chunks, num_seqs, context)
        return seconds * math.exp(self._noise() * self._sigma - self._sigma**2 / 2) if self._sigma else seconds

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
        if self.prefill is not None:
            self.prefill.turn()
        if self.decode is not None:
            self.decode.turn()


def output_of(num_rows: int) -> StepOutput:
    """Every token is 0: no simulated request ends but by its length."""
    return StepOutput(np.zeros(num_rows, np.int32))
