"""Whether to leave the ratio as it was first, or to follow the load. Pure; times in seconds.

The follower goes to the ratio that loses the least of the next ``FORESEEN_S``, if as many prompts come, and
as large a part of the answers ends, as now. It is not trusted: of both ways, to follow and to stay, the
requests of the last minutes that miss an objective are counted. Each is a virtual fleet that takes the same
arrivals: prompts queue, by their lengths; answers run in equal batches, and end as often per token as the
real ones do. No answer's length is guessed. Following loses what the real queue and the real batches lose,
while the load is followed. Staying is never charged with what following has left behind: in the first ratio
it loses the median of the virtual, the real and the measured losses, once that was left at most the virtual.

The load is followed once following has saved the requests of ``FOLLOW_S``, and no longer once it has saved
less than those of ``RETURN_S``.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from .capacity import Capacity
from .load_watch import LoadPicture
from .options import SteeringOptions

MEMORY_S = 200.0
LOAD_S = 6.0  # over which the load is a mean
ENDS_S = 3.0  # over which the ends per token are a mean
FORESEEN_S = 15.0
GAIN = 0.3  # share of the requests foreseen that a change of the follower must save
FOLLOW_S, RETURN_S = 3.0, 1.0  # of requests
MOST_RISE = 1.5  # of the predicted load, by a change of the follower
RAMP = 0.25  # width about an objective over which the share that misses it goes from 0 to 1
FULL = 0.9  # of the sequences that decode workers can have: then prompts wait

Size = tuple[float, float]
"""Prefill and decode workers, each counted by its speed."""


@dataclass(slots=True)
class _Load:
    """What arrives a second, and what ends."""

    arrivals: float = 0.0
    prompts: float = 0.0  # seconds of one worker
    ends: float = 1e-9
    tokens: float = 1e-6

    def take(self, picture: LoadPicture, prompts_s: float, seconds: float) -> None:
        """Go on by these seconds. ``prompts_s``: of one worker, for the newest prompts."""
        part, keep = 1 - math.exp(-seconds / LOAD_S), math.exp(-seconds / ENDS_S)
        self.arrivals += (picture.newest / seconds - self.arrivals) * part
        self.prompts += (prompts_s / seconds - self.prompts) * part
        self.ends = self.ends * keep + picture.newest_ends
        self.tokens = self.tokens * keep + picture.newest_output


@dataclass(slots=True)
class _Fleet:
    """Virtual, or a copy of the real one."""

    prefill: int
    waiting: float = 0.0  # prompts
    waiting_s: float = 0.0  # worker seconds of these
    running: float = 0.0  # answers
    lost: float = 0.0


class VirtualFleets:
    """Call ``serve`` once every ``every_s``."""

    def __init__(self, options: SteeringOptions) -> None:
        self._options = options
        self._sizes: dict[int, Size] = {}
        self._load = _Load()
        self._first, self._follower, self._real = _Fleet(0), _Fleet(0), _Fleet(0)
        self._follows = self._left = False
        self._count = self._span_s = 0.0  # requests, and seconds, remembered

    def best(self, allowed: Collection[int]) -> int:
        """Return the prefill workers to have now: the first ones only once the next seconds allow it."""
        there, real = self._first.prefill, self._real
        if self._follows:
            load = {p: self._capacity.pressure(self._picture, *size).worst for p, size in self._sizes.items()}
            most = MOST_RISE * load[real.prefill]
            return self._lead(real, [p for p in allowed if p == there or load[p] < most])
        is_well = there in allowed and self._foresee(real, there) < self._foresee(real, real.prefill)
        return there if is_well else real.prefill

    def serve(self, picture: LoadPicture, capacity: Capacity, sizes: dict[int, Size], present: int) -> None:
        """Take in the newest arrivals. ``sizes``: by prefill workers; all is forgotten if these change."""
        if sizes.keys() != self._sizes.keys():
            self.__init__(self._options)  # type: ignore[misc]
            self._first, self._follower = _Fleet(present), _Fleet(present)
        self._sizes, self._capacity, self._picture = sizes, capacity, picture
        self._batch, self._most = capacity.batch(picture), capacity.most(picture)
        seconds, count, waits = self._options.every_s, picture.newest, picture.num_waiting
        newest = replace(picture, new_tokens=picture.newest_tokens, pairs=picture.newest_pairs)
        prompts_s = count * capacity.prompt_s(newest)
        self._load.take(picture, prompts_s, seconds)
        self._real = _Fleet(present, waits, waits * capacity.prompt_s(picture), picture.num_decoding)
        keep = math.exp(-seconds / MEMORY_S)
        self._count, self._span_s = self._count * keep + count, self._span_s * keep + seconds
        self._left |= present != self._first.prefill
        real, measured = self._really_lost(prompts_s), 0.0 if self._left else count * (1 - picture.attainment)
        for fleet in (self._first, self._follower):
            lost = self._serve(fleet, prompts_s, seconds)
            fleet.lost = fleet.lost * keep + self._charged(fleet, lost, real, measured)
        self._follower.prefill = self._lead(self._follower, sizes)
        rate = max(self._count / self._span_s, self._load.arrivals)
        won = self._losses(self._first) - self._losses(self._follower)
        self._follows = won > (RETURN_S if self._follows else FOLLOW_S) * rate

    def _serve(self, fleet: _Fleet, prompts_s: float, seconds: float) -> float:
        """Take in the newest requests. Return how many of them miss an objective."""
        count, (prefill, decode) = self._picture.newest, self._sizes[fleet.prefill]
        fleet.waiting, fleet.waiting_s = fleet.waiting + count, fleet.waiting_s + prompts_s
        ends = self._ends(fleet.running / decode)
        most = decode * self._most * (1 + seconds * ends)
        room = max(0.0, most - fleet.running)
        share = min(1.0, seconds * prefill / max(fleet.waiting_s, 1e-9))
        begun = min(share, room / max(fleet.waiting, 1e-9))
        fleet.running += fleet.waiting * begun
        fleet.waiting, fleet.waiting_s = fleet.waiting * (1 - begun), fleet.waiting_s * (1 - begun)
        wait_s = fleet.waiting_s / prefill
        if begun < share:
            wait_s = max(wait_s, fleet.waiting / (fleet.running * ends))
        late = self._late(wait_s, prompts_s / max(1, count))
        slow = self._slow(fleet.running / decode)
        fleet.running *= math.exp(-seconds * self._ends(fleet.running / decode))
        return count * max(late, slow)

    def _really_lost(self, prompts_s: float) -> float:
        """Return how many of the newest requests will miss an objective, by the real queue and batches."""
        picture, (prefill, decode) = self._picture, self._sizes[self._real.prefill]
        late = self._late(self._real.waiting_s / prefill, prompts_s / max(1, picture.newest))
        slow = max(self._slow(self._real.running / decode), 1 - picture.in_pace)
        return picture.newest * max(late, slow if picture.in_pace < self._options.attainment else 0.0)

    def _losses(self, fleet: _Fleet) -> float:
        """Return the requests that a way has lost, and those that wait too long."""
        return fleet.lost + self._charged(fleet, self._waits_long(fleet), self._waits_long(self._real))

    def _waits_long(self, fleet: _Fleet) -> float:
        return fleet.waiting * self._late(fleet.waiting_s / self._sizes[fleet.prefill][0], 0.0)

    def _charged(self, fleet: _Fleet, virtual: float, real: float, measured: float = 0.0) -> float:
        """Return the losses of a way, by these three estimates."""
        if fleet is self._follower:
            return real if self._follows else virtual
        return sorted((virtual, real, measured))[1] if fleet.prefill == self._real.prefill else virtual

    def _lead(self, fleet: _Fleet, allowed: Collection[int]) -> int:
        """Return the prefill workers with which this fleet will lose the least."""
        here = fleet.prefill
        found = {prefill: self._foresee(fleet, prefill) for prefill in {here, *allowed}}
        best = min(found, key=lambda prefill: (found[prefill], abs(prefill - here)))
        return best if found[here] - found[best] > GAIN * self._load.arrivals * FORESEEN_S else here

    def _foresee(self, fleet: _Fleet, prefill: int) -> float:
        """Return how many requests of the next ``FORESEEN_S`` will miss an objective, or still wait too long
        at their end, if as many prompts come, and as large a part of the answers ends, as now."""
        load, (workers, decode) = self._load, self._sizes[prefill]
        prompt_s, running = load.prompts / max(load.arrivals, 1e-9), fleet.running / decode
        half_s = FORESEEN_S / 2
        begun = min(fleet.waiting + load.arrivals * half_s, workers * half_s / max(prompt_s, 1e-9))
        ends = half_s * self._ends(running)
        stay = math.exp(-ends)
        running = max(running, (fleet.running * stay + begun * (1 - stay) / ends) / decode)
        is_full = running >= FULL * self._most
        slow, served = 1.0 if is_full else self._slow(running), workers
        if is_full:  # a prompt waits until an answer ends
            served = min(workers, decode * self._most * self._ends(self._most) * prompt_s)
        lost = late = 0.0
        waiting_s, seconds = fleet.waiting_s, FORESEEN_S / 3
        for _ in range(3):
            waiting_s = max(0.0, waiting_s + (load.prompts - served) * seconds)
            late = self._late(waiting_s / workers, prompt_s)
            lost += load.arrivals * seconds * max(late, slow)
        still_run = max(0.0, fleet.running - decode * self._batch)
        return lost + late * waiting_s / max(prompt_s, 1e-9) + still_run

    def _ends(self, running: float) -> float:
        """Return the share of a decode worker's answers that ends in a second."""
        return self._load.ends / self._load.tokens / self._step_s(running)

    def _step_s(self, running: float) -> float:
        return self._capacity.step_s(max(1.0, running), self._picture)

    def _late(self, wait_s: float, prompt_s: float) -> float:
        return _missed((wait_s + prompt_s) / self._options.ttft_s)

    def _slow(self, running: float) -> float:
        """Return the share that misses the TPOT if a decode worker has this number of sequences."""
        return _missed(self._step_s(running) / self._options.tpot_s)


def _missed(load: float) -> float:
    """Return the share that misses an objective at this load of 1."""
    return min(1.0, max(0.0, (load - 1) / RAMP + 0.5))
