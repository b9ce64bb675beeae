"""The load of a number of prefill and decode workers, by the workers' latency model. Pure.

    prefill load = arrivals x worker seconds per prompt / (workers x highest utilisation that meets the TTFT)
    decode load  = batches that will run soon / (workers x 0.9); a batch is the largest that meets the TPOT

1 means: the objectives are just met. Waiting requests count as further arrivals, spread over ``work_off_s``.
A part of the running sequences still runs after that time (the long ones); the others give way to arrivals.
The wait for a prefill worker is Sakasegawa's
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
    """The demand on one worker, whatever the ratio; see ``Capacity``."""

    prompt_s: float
    answer_s: float
    batch: int
    staying: float  # share of the running sequences that still run after ``work_off_s``


@dataclass(frozen=True, slots=True)
class Capacity:
    """``max_batch_tokens`` and ``max_num_seqs``: of the workers."""

    profile: Profile
    options: SteeringOptions
    max_batch_tokens: int = 512
    max_num_seqs: int = 64

    def pressure(self, picture: LoadPicture, prefill: float, decode: float) -> Pressure:
        """Return the loads of these numbers of workers, each counted by its speed."""
        return self._pressure(picture, self._demand(picture), prefill, decode)

    def pressures(
        self, picture: LoadPicture, prefill: Iterable[int], num_workers: int
    ) -> list[tuple[int, Pressure]]:
        """Return the loads for each of these numbers of prefill workers among ``num_workers``."""
        demand = self._demand(picture)
        return [(each, self._pressure(picture, demand, each, num_workers - each)) for each in prefill]

    def best(self, picture: LoadPicture, num_workers: int) -> tuple[int, Pressure]:
        """Return the best number of prefill workers among ``num_workers``, and its loads."""
        found = self.pressures(picture, range(1, num_workers), num_workers)
        return min(found, key=lambda each: each[1].worst) if found else (0, Pressure(math.inf, math.inf))

    def _demand(self, picture: LoadPicture) -> _Demand:
        batch = self.batch(picture)
        lasts_s = picture.remaining_tokens * self.step_s(batch, picture)
        staying = math.exp(-self.options.work_off_s / lasts_s) if lasts_s else 0.0
        return _Demand(self.prompt_s(picture), self.answer_s(picture, batch), batch, staying)

    def _pressure(self, picture: LoadPicture, demand: _Demand, prefill: float, decode: float) -> Pressure:
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
        """Return the seconds of one prefill worker for a mean prompt, in full steps."""
        if not picture.new_tokens:
            return 0.0
        chunk = float(self.max_batch_tokens)
        steps, reads = picture.new_tokens / chunk, picture.pairs / picture.new_tokens * chunk
        seqs = max(1.0, chunk / picture.new_tokens)
        return steps * (self.profile.prefill.seconds(chunk, reads, seqs) + self.profile.prefill_loop_s)

    def answer_s(self, picture: LoadPicture, batch: int) -> float:
        """Return the seconds of one decode worker for a mean answer, in a batch of this size."""
        return max(0.0, picture.output_tokens - 1) * self.step_s(batch, picture) / batch

    def batch(self, picture: LoadPicture) -> int:
        """Return the most sequences that meet the TPOT and fit into the cache; at least 1."""
        low, high = 1, self.most(picture)
        while low < high:
            middle = (low + high + 1) // 2
            if self.step_s(middle, picture) <= PACE_MARGIN * self.options.tpot_s:
                low = middle
            else:
                high = middle - 1
        return low

    def most(self, picture: LoadPicture) -> int:
        """Return the most sequences that a worker can have, whatever their pace; at least 1."""
        memory = self.profile.memory
        fits = int(memory.num_blocks * memory.block_size / max(1.0, picture.context))
        return max(1, min(self.max_num_seqs, fits))

    def step_s(self, batch: float, picture: LoadPicture) -> float:
        return self.profile.decode.seconds(batch, batch * picture.context, batch) + self.profile.decode_loop_s

    def _utilisation(self, picture: LoadPicture, servers: float, service_s: float) -> float:
        """Return the highest utilisation at which nine of ten prompts meet their TTFT."""
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
