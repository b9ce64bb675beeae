"""How loaded so many prefill and decode workers would be, by the workers' latency model. Pure.

    prefill load = arrivals x worker seconds per prompt / (workers x highest utilisation at which prompts still make their TTFT)
    decode load  = batches that will run soon / (workers x 0.9), a batch being the largest that makes its TPOT

1 means: the objectives are just met. What waits counts as further arrivals, spread over the time in which it
is to be worked off. Of what runs now a part still will after that time (short answers have given way to
others, long ones have not); the rest is what arrivals come to. The wait for a prefill worker is Sakasegawa's
approximation for several servers (https://doi.org/10.1007/BF00052925), its 90th percentile that of an
exponential distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..engine.latency_profile import Profile
from .load_watch import LoadPicture
from .options import SteeringOptions

DECODE_UTILISATION = 0.9
PACE_MARGIN = 0.95  # of the TPOT allowed
P90 = 2.3  # of an exponential distribution, in means: ln 10


@dataclass(frozen=True, slots=True)
class Pressure:
    """Loads by role."""

    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        return max(self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class _Demand:
    """What a load asks of one worker, whatever the ratio; see ``Capacity``."""

    prompt_s: float
    answer_s: float
    batch: int
    staying: float  # share of the sequences that run now which will run still when ``work_off_s`` are over


@dataclass(frozen=True, slots=True)
class Capacity:
    """``max_batch_tokens`` and ``max_num_seqs``: of the workers."""

    profile: Profile
    options: SteeringOptions
    max_batch_tokens: int = 512
    max_num_seqs: int = 64

    def pressure(self, picture: LoadPicture, prefill: int, decode: int) -> Pressure:
        """With so many workers of each role."""
        return self._pressure(picture, self._demand(picture), prefill, decode)

    def pressures(
        self, picture: LoadPicture, prefill: Iterable[int], num_workers: int
    ) -> list[tuple[int, Pressure]]:
        """Of so many workers, with so many each that compute prompts."""
        demand = self._demand(picture)
        return [(each, self._pressure(picture, demand, each, num_workers - each)) for each in prefill]

    def best(self, picture: LoadPicture, num_workers: int) -> tuple[int, Pressure]:
        """Of so many workers: how many should compute prompts."""
        found = self.pressures(picture, range(1, num_workers), num_workers)
        return min(found, key=lambda each: each[1].worst) if found else (0, Pressure(math.inf, math.inf))

    def _demand(self, picture: LoadPicture) -> _Demand:
        batch = self.batch(picture)
        lasts_s = picture.remaining_tokens * self._step_s(batch, picture)
        staying = math.exp(-self.options.work_off_s / lasts_s) if lasts_s else 0.0
        return _Demand(self.prompt_s(picture), self._answer_s(picture, batch), batch, staying)

    def _pressure(self, picture: LoadPicture, demand: _Demand, prefill: int, decode: int) -> Pressure:
        options = self.options
        if not prefill or not decode:
            return Pressure(math.inf, math.inf)
        late = max(0, picture.num_waiting - 2 * prefill)
        rate = picture.rate + late / options.work_off_s
        batches = (
            demand.staying * picture.num_decoding / demand.batch
            + (1 - demand.staying) * rate * demand.answer_s
        )
        most = self._utilisation(picture, prefill, demand.prompt_s)
        return Pressure(rate * demand.prompt_s / (prefill * most), batches / (decode * DECODE_UTILISATION))

    def prompt_s(self, picture: LoadPicture) -> float:
        """Seconds of one prefill worker for a mean prompt, in steps that are full."""
        if not picture.new_tokens:
            return 0.0
        chunk = float(self.max_batch_tokens)
        steps, reads = picture.new_tokens / chunk, picture.pairs / picture.new_tokens * chunk
        seqs = max(1.0, chunk / picture.new_tokens)
        return steps * (self.profile.prefill.seconds(chunk, reads, seqs) + self.profile.prefill_loop_s)

    def _answer_s(self, picture: LoadPicture, batch: int) -> float:
        """Seconds of one decode worker for a mean answer, as one of a batch of so many."""
        return max(0.0, picture.output_tokens - 1) * self._step_s(batch, picture) / batch

    def batch(self, picture: LoadPicture) -> int:
        """The most sequences that run at the pace that is allowed and fit into the cache; at least 1."""
        memory = self.profile.memory
        fits = int(memory.num_blocks * memory.block_size / max(1.0, picture.context))
        low, high = 1, max(1, min(self.max_num_seqs, fits))
        while low < high:
            middle = (low + high + 1) // 2
            if self._step_s(middle, picture) <= PACE_MARGIN * self.options.tpot_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _step_s(self, batch: int, picture: LoadPicture) -> float:
        return self.profile.decode.seconds(batch, batch * picture.context, batch) + self.profile.decode_loop_s

    def _utilisation(self, picture: LoadPicture, servers: int, service_s: float) -> float:
        """The highest at which nine of ten prompts make their TTFT."""
        left = self.options.ttft_s - service_s
        power, scale = (
            math.sqrt(2 * (servers + 1)) - 1,
            P90 * service_s * (1 + picture.variation) / (2 * servers),
        )
        low, high = 0.05, 0.95
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if scale * middle**power <= left * (1 - middle) else (low, middle)
        return low
