"""A sketch of a cluster under a load: prompts queue, sequences share a device, nothing else is there. It
ranks; the simulator decides.

Prompts go to the worker with the fewest tokens before it and are computed in chunks, shortest first with
aging. Between two arrivals a decode batch is a fluid: its steps take the profiled time for its sequences and
context. On a worker of both roles a step with prompts has its sequences, too. Without messages, full caches
and protocol a request takes about forty microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ...engine.latency_profile import Profile
from ...transport.messages.prompt_order import prompt_rank
from ..simulator.slo import Slo

COORDINATOR_S = 1e-3


@dataclass(frozen=True, slots=True)
class SketchPool:
    """``count`` equal workers that compute prompts, generate, or both."""

    times: StepTimes
    count: int
    computes: bool
    generates: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """``num_new``: prompt tokens that no prefix cache has."""

    at_s: float
    num_new: int
    num_prompt: int
    num_output: int


class StepTimes:
    """A profile's step times as tables, for ``max_batch_tokens`` prompt tokens and ``max_num_seqs`` sequences
    in a step."""

    def __init__(self, profile: Profile, max_batch_tokens: int, max_num_seqs: int) -> None:
        self.max_batch_tokens, self.max_num_seqs = max_batch_tokens, max_num_seqs
        self.least_prompt_tokens = min(profile.memory.block_size, max_batch_tokens)  # beside sequences
        self.num_tokens = profile.memory.num_blocks * profile.memory.block_size
        prefill, decode = profile.prefill.seconds, profile.decode.seconds
        self._prompt = [prefill(n, 0, 0) for n in range(max_batch_tokens + 1)]
        self._prompt_read = [prefill(n, 1e6, 0) * 1e-6 - 1e-6 * base for n, base in enumerate(self._prompt)]
        self._prompt_seq, self._prompt_cached = (
            profile.prefill.pieces[-1].seq_s,
            profile.prefill.pieces[-1].cached_s,
        )
        self._decode = [decode(n, 0, n) for n in range(max_num_seqs + 1)]
        self._decode_read = [decode(n, 1e6, n) * 1e-6 - 1e-6 * base for n, base in enumerate(self._decode)]
        self.prefill_loop_s, self.decode_loop_s = profile.prefill_loop_s, profile.decode_loop_s
        self._once_s = self.prefill_loop_s + profile.once_s
        handoff = profile.handoff
        self._token_s = profile.memory.block_bytes / profile.memory.block_size / handoff.bytes_per_s
        self._handoff_s = 2 * handoff.message_s + handoff.put_s + handoff.join_s
        self._num_layers = profile.memory.num_layers
        self.message_s = handoff.message_s
        self.handoff_to_itself_s = 3 * handoff.message_s + handoff.join_s

    def decode_s(self, num_seqs: int, context: float) -> float:
        return self._decode[num_seqs] + self._decode_read[num_seqs] * context + self.decode_loop_s

    def prompts_s(self, units: int, reads: float, seqs: int, cached: int) -> float:
        seconds = (
            self._prompt[units]
            + self._prompt_read[units] * reads
            + self._prompt_seq * seqs
            + self._prompt_cached * cached
        )
        return seconds + self.prefill_loop_s

    def both_s(self, prompts_s: float, num_seqs: int, context: float) -> float:
        """Seconds of a step of prompts that takes ``prompts_s`` without these sequences."""
        return max(0.0, prompts_s + self.decode_s(num_seqs, context) - self._once_s)

    def handoff_s(self, num_new: int, computed_in_s: float) -> float:
        """What of the transfer is left when the prompt is computed: the last layer of the last chunk, or what
        the link could not keep up with."""
        last = min(num_new, self.max_batch_tokens) * self._token_s / self._num_layers
        return self._handoff_s + max(last, num_new * self._token_s - computed_in_s)


@dataclass(slots=True)
class Sketched:
    """``num_good`` of ``num_ended``. ``busy_s``: seconds in which steps ran, over all workers, by pool: (with
    prompts, without)."""

    num_good: float = 0
    num_ended: int = 0
    elapsed_s: float = 0.0
    busy_s: list[tuple[float, float]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)  # 0 of a request with one token
    e2e_s: list[float] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        return max(0.0, self.num_good / max(1, self.num_ended))


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    pool: int
    times: StepTimes
    prompts: list[tuple[tuple[bool, float], int]] = field(default_factory=list)  # by rank: requests
    pending: int = 0  # tokens of those
    stepping: bool = False  # a step of prompts runs, or what is left of the one of sequences before it
    due: float = 0.0  # decode steps that this is: one, the part that is left, or 0 without sequences
    chunks: list[tuple[int, int]] = field(default_factory=list)  # of the step: (request, tokens)
    running: list[tuple[float, int]] = field(default_factory=list)  # by the number of steps at which they end
    steps: float = 0.0  # decode steps so far
    context: float = 0.0  # tokens in the caches of those running
    at: float = 0.0  # time up to which it has advanced
    version: int = 0  # of the next event
    held: int = 0  # sequences that have a place
    held_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


_STEPPED, _FLUID, _JOINS, _DECODED = range(4)


class Sketch:
    """One run over ``arrivals``. Ends early when more than ``allowed`` requests have missed their bounds.
    ``coordinator_s``: of each request, in HTTP, template and tokenizer."""

    def __init__(
        self,
        pools: Sequence[SketchPool],
        bounds: Slo,
        allowed: float = float("inf"),
        coordinator_s: float = COORDINATOR_S,
    ) -> None:
        self._bounds, self._allowed, self._coordinator_s = bounds, allowed, coordinator_s
        self._prefills: list[_Worker] = []  # but those that generate too
        self._decodes: list[_Worker] = []
        self._workers: list[_Worker] = []
        for index, pool in enumerate(pools):
            for _ in range(pool.count):
                worker = _Worker(len(self._workers), index, pool.times)
                self._workers.append(worker)
                if pool.computes and not pool.generates:
                    self._prefills.append(worker)
                if pool.generates:
                    self._decodes.append(worker)
        self._together = [pool.computes and pool.generates for pool in pools]
        self._num_pools = len(pools)
        # when, number, kind, whose, version or request
        self._events: list[tuple[float, int, int, _Worker | None, int]] = []
        self._number = 0

    def run(self, arrivals: Sequence[Arrival]) -> Sketched:
        self._arrivals = arrivals
        self._left = [a.num_new for a in arrivals]
        self._first = [0.0] * len(arrivals)
        self._place: list[_Worker | None] = [None] * len(arrivals)  # the worker that generates
        self._waiting: list[int] = []  # nobody has room to generate for them
        self._known, self._missed = Sketched(), [0] * len(self._bounds.parts)
        events, following = self._events, 0
        while True:
            if following < len(arrivals) and (not events or arrivals[following].at_s <= events[0][0]):
                self._now = arrivals[following].at_s
                self._arrive(following)
                following += 1
            elif events:
                self._now, _, kind, worker, value = heappop(events)
                if worker is None:
                    self._join(value)
                elif kind == _STEPPED:
                    self._stepped(worker, value)
                elif kind == _DECODED:
                    self._decoded(worker, value)
                elif worker.version == value:
                    self._follow(worker)
                    self._go_on(worker)
            else:
                break
            if self._known.num_ended - self._known.num_good > self._allowed:
                break
        known = self._known
        known.elapsed_s = self._now - arrivals[0].at_s
        for pool in range(self._num_pools):
            of = [w for w in self._workers if w.pool == pool]
            known.busy_s.append((sum(w.prefill_s for w in of), sum(w.decode_s for w in of)))
        return known

    def _at(self, when: float, kind: int, worker: _Worker | None, value: int) -> None:
        self._number += 1
        heappush(self._events, (when, self._number, kind, worker, value))

    # --- prompts ---------------------------------------------------------------------------------

    def _arrive(self, request: int) -> None:
        if self._waiting or not self._dispatch(request):
            self._waiting.append(request)

    def _dispatch(self, request: int) -> bool:
        arrival = self._arrivals[request]
        place = max(self._decodes, key=_share_left)
        if not _has_room(place, arrival.num_prompt):
            return False
        prefill = self._who_computes(arrival, request, place)
        place.held += 1
        place.held_tokens += arrival.num_prompt + arrival.num_output // 2
        self._place[request] = place
        heappush(prefill.prompts, (self._rank(arrival, arrival.num_new, prefill), request))
        prefill.pending += arrival.num_new
        if not prefill.stepping:
            self._follow(prefill)
            self._take_turn(prefill)
        return True

    def _rank(self, arrival: Arrival, num_tokens_left: int, worker: _Worker) -> tuple[bool, float]:
        """Return the prompt's rank. What it has waited is counted from zero, not from now, so that ranks stay
        comparable."""
        waited_s = -(arrival.at_s + self._coordinator_s)
        return prompt_rank(False, num_tokens_left, waited_s, worker.times.max_batch_tokens)

    def _who_computes(self, arrival: Arrival, request: int, place: _Worker) -> _Worker:
        """A prefill worker, or the one that generates, where it does both: whichever costs less, as in
        coordinator/lifecycle/routing.py."""
        prefill = (
            min(self._prefills, key=lambda w: (w.pending, _turn(w.number, request)))
            if self._prefills
            else place
        )
        if (
            self._together[place.pool]
            and place.pending + arrival.num_new * (1 + len(place.running))
            <= prefill.pending + arrival.num_new
        ):
            return place
        return prefill

    def _take_turn(self, worker: _Worker) -> None:
        """A step of prompts, after what is left of the running one of sequences."""
        begun = worker.steps % 1.0
        if worker.running and begun:
            worker.due, worker.stepping = 1.0 - begun, True
            worker.version += 1
            seconds = worker.due * worker.times.decode_s(len(worker.running), worker.context)
            worker.decode_s += seconds
            self._at(self._now + seconds, _DECODED, worker, len(worker.running))
        else:
            self._begin(worker)

    def _decoded(self, worker: _Worker, num_seqs: int) -> None:
        self._advance(worker, num_seqs)
        self._begin(worker)

    def _advance(self, worker: _Worker, num_seqs: int) -> None:
        """A step, or the rest of one, is over that had these sequences."""
        worker.at = self._now
        worker.steps = float(round(worker.steps + worker.due)) if worker.due else worker.steps
        worker.context += worker.due * num_seqs
        worker.due = 0.0
        self._end_those_done(worker)

    def _begin(self, worker: _Worker) -> None:
        num_seqs, times = len(worker.running), worker.times
        budget = most = max(times.max_batch_tokens - num_seqs, times.least_prompt_tokens)
        reads, cached = 0.0, 0
        while worker.prompts and budget:
            _, request = heappop(worker.prompts)
            arrival, left = self._arrivals[request], self._left[request]
            count = left if left < budget else budget
            start = arrival.num_prompt - left
            reads += count * start + count * (count + 1) * 0.5
            cached += start
            budget -= count
            worker.chunks.append((request, count))
        seconds = times.prompts_s(most - budget, reads, len(worker.chunks), cached)
        if num_seqs:
            seconds = times.both_s(seconds, num_seqs, worker.context)
            worker.due = 1.0
        worker.stepping = True
        worker.version += 1
        worker.prefill_s += seconds
        self._at(self._now + seconds, _STEPPED, worker, num_seqs)

    def _stepped(self, worker: _Worker, num_seqs: int) -> None:
        worker.stepping = False
        self._advance(worker, num_seqs)
        chunks, worker.chunks = worker.chunks, []
        for request, count in chunks:
            self._left[request] -= count
            worker.pending -= count
            if self._left[request]:
                arrival = self._arrivals[request]
                heappush(worker.prompts, (self._rank(arrival, self._left[request], worker), request))
            else:
                self._computed(worker, request)
        self._go_on(worker)

    def _computed(self, worker: _Worker, request: int) -> None:
        arrival, times = self._arrivals[request], worker.times
        self._first[request] = self._now + times.message_s + self._coordinator_s
        if arrival.num_output == 1:
            self._end(request)
        elif self._place[request] is worker:
            self._at(self._now + times.handoff_to_itself_s, _JOINS, None, request)
        else:
            computed_in = times.prompts_s(min(arrival.num_new, times.max_batch_tokens), 0.0, 1, 0)
            self._at(self._now + times.handoff_s(arrival.num_new, computed_in), _JOINS, None, request)

    # --- sequences -------------------------------------------------------------------------------

    def _join(self, request: int) -> None:
        worker, arrival = self._place[request], self._arrivals[request]
        assert worker is not None, "it was dispatched"
        self._follow(worker)
        # what is left of the decode step that runs
        of_running = worker.due if worker.stepping else 0.5 if worker.running else 0.0
        heappush(worker.running, (worker.steps + of_running + arrival.num_output - 1, request))
        worker.context += arrival.num_prompt
        if not worker.stepping:
            self._go_on(worker)

    def _follow(self, worker: _Worker) -> None:
        """Brings a fluid batch up to now."""
        elapsed, worker.at = self._now - worker.at, self._now
        num = len(worker.running)
        if worker.stepping or not num or elapsed <= 0:
            return
        about = elapsed / worker.times.decode_s(num, worker.context)
        steps = elapsed / worker.times.decode_s(num, worker.context + num * about / 2)
        worker.decode_s += elapsed
        worker.steps += steps
        worker.context += num * steps
        self._end_those_done(worker)

    def _end_those_done(self, worker: _Worker) -> None:
        running = worker.running
        while running and running[0][0] <= worker.steps + 1e-6:
            _, request = heappop(running)
            arrival = self._arrivals[request]
            worker.context -= arrival.num_prompt + arrival.num_output - 1
            self._end(request)
        if not running:
            worker.context = 0.0

    def _go_on(self, worker: _Worker) -> None:
        """Whatever it does next."""
        if worker.prompts and not worker.stepping:
            self._take_turn(worker)
        elif worker.running and not worker.stepping:
            num, steps = len(worker.running), worker.running[0][0] - worker.steps
            worker.version += 1
            seconds = steps * worker.times.decode_s(num, worker.context + num * steps / 2)
            self._at(self._now + max(seconds, 0.0) + 1e-9, _FLUID, worker, worker.version)

    def _end(self, request: int) -> None:
        arrival, worker, bounds = self._arrivals[request], self._place[request], self._bounds
        assert worker is not None, "it was dispatched"
        worker.held -= 1
        worker.held_tokens -= arrival.num_prompt + arrival.num_output // 2
        ended = self._now + worker.times.message_s
        ttft_s = self._first[request] - arrival.at_s
        tpot_s = (ended - self._first[request]) / (arrival.num_output - 1) if arrival.num_output > 1 else 0.0
        self._known.ttft_s.append(ttft_s)
        self._known.tpot_s.append(tpot_s)
        self._known.e2e_s.append(ended - arrival.at_s)
        self._known.num_ended += 1
        for index, part in enumerate(bounds.parts):
            most = part.most(arrival.num_prompt, arrival.num_output)
            self._missed[index] += (
                ttft_s > most.ttft
                or tpot_s > most.tpot
                or ended - self._first[request] > most.tpot_all * arrival.num_output
                or ended - arrival.at_s > most.e2e
            )
        self._known.num_good = self._known.num_ended - bounds.failed(self._missed)
        while self._waiting and self._dispatch(self._waiting[0]):
            self._waiting.pop(0)


def _turn(number: int, request: int) -> int:
    """A tie-break without a pattern."""
    return ((number + 1) * 2_654_435_761 ^ (request + 1) * 2_246_822_519) * 3_266_489_917 & 0xFFFF_FFFF


def _share_left(worker: _Worker) -> float:
    rows = 1 - (worker.held + 1) / worker.times.max_num_seqs
    return min(rows, 1 - worker.held_tokens / worker.times.num_tokens)


def _has_room(worker: _Worker, num_tokens: int) -> bool:
    if not worker.held:
        return True
    return (
        worker.held < worker.times.max_num_seqs and worker.held_tokens + num_tokens <= worker.times.num_tokens
    )
