"""What each ratio would have served of the last minutes, and will soon. Pure; times in seconds.

For each ratio a virtual fleet takes the arrivals of every second, as work that the latency model knows:
prompts queue, answers fill workers for as long as they last. Requests that would have missed an objective
count as lost, and are slowly forgotten; those of the next ``FORESEEN_S``, if the load stays, are added. One
more virtual fleet follows the load, some seconds behind it: where the load alternates faster than that, it
loses more than a ratio that is fair to all mixes.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace

from .capacity import Capacity
from .load_watch import LoadPicture
from .options import SteeringOptions

MEMORY_S = 200.0
FOLLOW_S = 6.0  # over which the follower takes the mean of the load
FOLLOW_ABOVE, FOLLOW_GAIN = 0.9, 0.15  # load below which it stays, and least relative gain
PREFILL_UTILISATION = 0.95
# above 1: the largest batch that meets the TPOT may be exceeded for a while, since a request's TPOT is a mean
DECODE_UTILISATION = 1.1
FULL_UTILISATION = 0.9  # where a batch cannot be exceeded: requests wait for a place before their prompt
FORESEEN_S = 15.0
RAMP = 0.25  # width about an objective over which the share that misses it goes from 0 to 1
FOLLOWER_S = 2.0  # of requests, by which the follower must have lost less than every fixed ratio


Size = tuple[float, float]
"""Prefill and decode workers, each counted by its speed."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Of ``count`` arrivals. ``prompts``, ``answers``: in worker seconds."""

    count: int
    prompts: float
    answers: float
    prompt_s: float
    answer_lasts_s: float


@dataclass(slots=True)
class _Load:
    """What arrives a second, as a mean over ``FOLLOW_S``."""

    arrivals: float = 0.0
    prompts: float = 0.0  # worker seconds, as the answers
    answers: float = 0.0
    answer_lasts_s: float = 1.0

    def take(self, work: _Work, seconds: float) -> None:
        """Go on by these seconds."""
        part = 1 - math.exp(-seconds / FOLLOW_S)
        self.arrivals += (work.count / seconds - self.arrivals) * part
        self.prompts += (work.prompts / seconds - self.prompts) * part
        self.answers += (work.answers / seconds - self.answers) * part
        self.answer_lasts_s = work.answer_lasts_s


@dataclass(slots=True)
class _VirtualFleet:
    prefill: int
    size: Size = (1.0, 1.0)
    waiting_s: float = 0.0  # worker seconds of prompts
    running: float = 0.0  # decode workers that the running answers fill
    lost: float = 0.0

    def serve(self, work: _Work, ttft_s: float, seconds: float) -> float:
        """Take in the work of these seconds. Return how many of its requests miss an objective."""
        done_s = seconds * self.size[0] * PREFILL_UTILISATION
        self.waiting_s = max(0.0, self.waiting_s + work.prompts - done_s)
        part = 1 - math.exp(-seconds / work.answer_lasts_s)
        self.running += (work.answers / seconds - self.running) * part
        late = _missed((self.waiting_s / self.size[0] + work.prompt_s) / ttft_s)
        return work.count * max(late, self._slow(self.running))

    def foresee(self, load: _Load, ttft_s: float) -> float:
        """Return the share of the requests of the next ``FORESEEN_S`` that will miss an objective."""
        begin = self.waiting_s - ttft_s * self.size[0]  # above 0: late
        end = begin + (load.prompts - self.size[0] * PREFILL_UTILISATION) * FORESEEN_S
        part = 1 - math.exp(-FORESEEN_S / load.answer_lasts_s)
        slow = self._slow(self.running + (load.answers - self.running) * part)
        return max(slow, _share_above_zero(begin, end))

    def _slow(self, running: float) -> float:
        return _missed(running / (self.size[1] * DECODE_UTILISATION))


class VirtualFleets:
    """Call ``serve`` once every ``every_s``."""

    def __init__(self, options: SteeringOptions) -> None:
        self._options = options
        self._fixed: dict[int, _VirtualFleet] = {}
        self._follower = _VirtualFleet(0)
        self._load = _Load()
        self._count = self._span_s = 0.0

    @property
    def rate(self) -> float:
        """Requests a second, of the time remembered."""
        return self._count / self._span_s if self._span_s else 0.0

    def foreseen(self, prefill: int) -> float:
        """Return the share of requests that will miss an objective with this number of prefill workers."""
        return self._fixed[prefill].foresee(self._load, self._options.ttft_s)

    def lost(self, prefill: int) -> float:
        """Return the requests that this number of prefill workers would have lost, and soon will."""
        return self._lost(self._fixed[prefill])

    def best(self, present: int, allowed: Container[int]) -> tuple[int, float]:
        """Return the prefill workers to have now, and what that way loses."""
        lost = {prefill: self.lost(prefill) for prefill in self._fixed if prefill in allowed}
        best = min(lost, key=lambda prefill: (lost[prefill], abs(prefill - present)))
        follower = self._lost(self._follower)
        if self._follower.prefill in allowed and follower < lost[best] - FOLLOWER_S * self.rate:
            return self._follower.prefill, follower
        return best, lost[best]

    def serve(self, picture: LoadPicture, capacity: Capacity, sizes: dict[int, Size], present: int) -> None:
        """Take in the newest arrivals. ``sizes``: by prefill workers; all is forgotten if these change."""
        options = self._options
        if sizes.keys() != self._fixed.keys():
            self.__init__(options)  # type: ignore[misc]
            self._fixed = {prefill: _VirtualFleet(prefill) for prefill in sizes}
            self._follower.prefill = present
        seconds, work = options.every_s, _work(picture, capacity)
        keep = math.exp(-seconds / MEMORY_S)
        self._count, self._span_s = self._count * keep + work.count, self._span_s * keep + seconds
        is_good = picture.attainment >= options.attainment
        for fleet in [*self._fixed.values(), self._follower]:
            fleet.size = sizes[fleet.prefill]
            lost = fleet.serve(work, options.ttft_s, seconds)
            # the measured share of good requests overrules the model
            fleet.lost = fleet.lost * keep + (0.0 if is_good and fleet.prefill == present else lost)
        self._load.take(work, seconds)
        self._follow()

    def _lost(self, fleet: _VirtualFleet) -> float:
        share = fleet.foresee(self._load, self._options.ttft_s)
        return fleet.lost + share * self._load.arrivals * FORESEEN_S

    def _follow(self) -> None:
        follower = self._follower
        prompts = (self._load.prompts + follower.waiting_s / self._options.work_off_s) / PREFILL_UTILISATION
        answers = self._load.answers / DECODE_UTILISATION
        loads = {p: max(prompts / fleet.size[0], answers / fleet.size[1]) for p, fleet in self._fixed.items()}
        best, here = min(loads, key=lambda p: (loads[p], abs(p - follower.prefill))), loads[follower.prefill]
        if here > FOLLOW_ABOVE and loads[best] < (1 - FOLLOW_GAIN) * here:
            follower.prefill = best


def _missed(load: float) -> float:
    """Return the share that misses an objective at this load of 1."""
    return min(1.0, max(0.0, (load - 1) / RAMP + 0.5))


def _share_above_zero(begin: float, end: float) -> float:
    """Return the share of a line from ``begin`` to ``end`` that is above zero."""
    low, high = min(begin, end), max(begin, end)
    if low > 0 or high <= 0:
        return float(low > 0)
    return high / (high - low)


def _work(picture: LoadPicture, capacity: Capacity) -> _Work:
    newest = replace(
        picture,
        new_tokens=picture.newest_tokens,
        pairs=picture.newest_pairs,
        output_tokens=picture.newest_output,
    )
    batch, count = capacity.batch(picture), picture.newest
    prompt_s, answer_s = capacity.prompt_s(newest), capacity.answer_s(newest, batch)
    if batch == capacity.most(picture):
        answer_s *= DECODE_UTILISATION / FULL_UTILISATION
    lasts_s = max(capacity.options.every_s, picture.output_tokens * capacity.step_s(batch, picture))
    return _Work(count, count * prompt_s, count * answer_s, prompt_s, lasts_s)
