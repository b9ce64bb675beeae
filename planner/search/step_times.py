"""A profile's times in closed form: of steps, of runs of equal decode steps, and of a prompt's puts."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from ...engine.latency_profile import Profile, StepModel
from ...transport.handoff.layer_slicing import LayerSlicing


class StepTimes:
    """Tables for up to ``max_batch_tokens`` prompt tokens and ``max_num_seqs`` sequences in a step."""

    def __init__(self, profile: Profile, max_batch_tokens: int, max_num_seqs: int) -> None:
        self.max_batch_tokens, self.max_num_seqs = max_batch_tokens, max_num_seqs
        self.memory, self.handoff = profile.memory, profile.handoff
        self.message_s = profile.handoff.message_s
        self.put_s, self.slice_s = profile.handoff.put_s, profile.handoff.slice_s
        self.bytes_per_s = profile.handoff.bytes_per_s
        self.least_prompt_tokens = min(profile.memory.block_size, max_batch_tokens)  # beside sequences
        self._prompt, self._prompt_read = _tables(profile.prefill, max_batch_tokens, seqs_a_unit=0)
        last = profile.prefill.pieces[-1]
        self._prompt_seq, self._prompt_cached = last.seq_s, last.cached_s
        self._decode, self._decode_read = _tables(profile.decode, max_num_seqs, seqs_a_unit=1)
        self.prefill_loop_s, self.decode_loop_s = profile.prefill_loop_s, profile.decode_loop_s
        self._once_s = self.prefill_loop_s + profile.once_s
        self.slicing = LayerSlicing(profile.memory.num_layers, profile.memory.block_bytes)

    def decode_s(self, num_seqs: int, context: float) -> float:
        return self._decode[num_seqs] + self._decode_read[num_seqs] * context + self.decode_loop_s

    def run_s(self, num_steps: int, num_seqs: int, context: int) -> float:
        """Seconds of this number of decode steps; ``context``: of the first one."""
        more = self._decode_read[num_seqs] * num_seqs * 0.5
        return num_steps * (self.decode_s(num_seqs, context) + more * (num_steps - 1))

    def num_steps(self, seconds: float, num_seqs: int, context: int) -> int:
        """Number of such steps until the first end that is not before ``seconds``."""
        read = self._decode_read[num_seqs]
        more = read * num_seqs * 0.5
        first = self._decode[num_seqs] + read * context + self.decode_loop_s - more
        return ceil(2 * seconds / (first + sqrt(first * first + 4 * more * seconds)) - 1e-9)

    def prompts_s(self, units: int, reads: int, seqs: int, cached: int) -> float:
        seconds = self._prompt[units] + self._prompt_read[units] * reads
        return seconds + self._prompt_seq * seqs + self._prompt_cached * cached + self.prefill_loop_s

    def both_s(self, prompts_s: float, num_seqs: int, context: float) -> float:
        """Seconds of a step of prompts that takes ``prompts_s`` without these sequences."""
        return max(0.0, prompts_s + self.decode_s(num_seqs, context) - self._once_s)

    def bytes_of(self, num_blocks: int, num_layers: int) -> int:
        """Bytes of these layers of these blocks."""
        return num_blocks * self.memory.block_bytes * num_layers // self.memory.num_layers

    def check_s(self, num_blocks: int) -> float:
        """Seconds that the receiver takes to check them."""
        return num_blocks * self.memory.block_bytes / self.handoff.check_bytes_per_s


def _tables(model: StepModel, most: int, seqs_a_unit: int) -> tuple[list[float], list[float]]:
    """Seconds of steps of 0 to ``most`` units that read nothing, and seconds more for each unit read."""
    units = np.arange(most + 1.0)
    base, read = (_seconds(model, units, reads, units * seqs_a_unit) for reads in (0.0, 1e6))
    return base.tolist(), (read * 1e-6 - 1e-6 * base).tolist()


def _seconds(
    model: StepModel, units: NDArray[np.float64], reads: float, seqs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """``model.seconds`` of many steps: a search makes hundreds of tables of thousands of steps."""
    seconds = np.empty_like(units)
    for piece in reversed(model.pieces):  # the first that holds counts
        holds = units < (np.inf if piece.below is None or piece is model.pieces[-1] else piece.below)
        x, y = np.array(piece.curve).T
        i = np.clip(np.searchsorted(x, units, side="right"), 1, max(1, len(x) - 1))
        at = np.full_like(units, y[0])
        if len(x) > 1:
            at = (y[i] - y[i - 1]) / (x[i] - x[i - 1]) * (units - x[i - 1]) + y[i - 1]
        seconds[holds] = (at + piece.read_s * reads + piece.seq_s * seqs)[holds]
    return np.maximum(seconds, 0.0)
