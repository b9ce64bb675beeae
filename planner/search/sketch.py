"""A cluster under a load, decision by decision: the coordinator's queue, placement and routing as they ship,
called directly; workers and links in closed form.

Prompts are computed in chunks, shortest first with aging. Equal decode steps are one event, until a sequence
ends or joins. On a worker of both roles a step with prompts has its sequences, too. Of messages there are
only their times; there are no tokens, no failures, and one prefix cache without bound, unknown to routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from ...coordinator.lifecycle.actions import Action, Send
from ...coordinator.lifecycle.lifecycle import CHARGE_EVERY_S
from ...coordinator.lifecycle.limits import LifecycleLimits
from ...coordinator.lifecycle.placement import Placement
from ...coordinator.lifecycle.pools import Pools
from ...coordinator.lifecycle.request import Request
from ...coordinator.lifecycle.request_queue import RequestQueue
from ...coordinator.lifecycle.state_machine import RequestStateMachine
from ...coordinator.lifecycle.worker import WorkerRecord
from ...engine.cache.block_manager import has_spare
from ...transport.messages.fields import PROCESS_BITS
from ...transport.messages.messages import Alive, Hello, Load, Role
from ...transport.process.heap import collapse_heap
from ..simulator.coordinator import TICK_S
from ..simulator.events import EventQueue
from ..simulator.process import TICKS_BEGIN, identity_of
from ..simulator.prompts import NO_SINK, sampling
from ..simulator.simulation import WARM_UP_S
from ..simulator.slo import Slo
from .sketched_heartbeat import HEARTBEAT_S
from .sketched_request import Arrival, Asked, Place
from .sketched_worker import SketchWorker
from .step_times import StepTimes

COLLAPSE_EVERY = 8192  # requests
GIVEN_UP_S = LifecycleLimits().queue_timeout_s
COORDINATOR_S = 1e-3
NOTHING = Alive(coordinator=1)


@dataclass(frozen=True, slots=True)
class SketchPool:
    """``count`` equal workers that compute prompts, generate, or both."""

    times: StepTimes
    count: int
    computes: bool
    generates: bool


@dataclass(slots=True)
class Sketched:
    """``num_good`` of ``num_ended``. ``busy_s``: seconds in which steps ran, over all workers, by pool: (with
    prompts, without). Times are of those that finished."""

    num_good: float = 0
    num_ended: int = 0
    num_refused: int = 0  # of them: too long for the workers
    is_exact: bool = True  # each request's times are the simulator's: see ``Coordinator``
    elapsed_s: float = 0.0
    busy_s: list[tuple[float, float]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)  # 0 of a request with one token
    e2e_s: list[float] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        return max(0.0, self.num_good / max(1, self.num_ended))


class _Machine(RequestStateMachine):
    """Dispatches to workers here, without a message."""

    dispatched: Callable[[Asked, WorkerRecord, WorkerRecord], None]

    def dispatch(
        self, request: Request, prefill: WorkerRecord, decode: WorkerRecord, now: float, source: object
    ) -> list[Action]:
        assert isinstance(request, Asked), "all requests are"
        self.assignments.assign(request, prefill, decode)
        self.dispatched(request, prefill, decode)
        return [Send(prefill.id, NOTHING)]


class Sketch:
    """One run over ``arrivals``. Ends early when more than ``allowed`` requests have missed their bounds.
    ``coordinator_s``: of each request, in HTTP, template and tokenizer."""

    def __init__(
        self,
        pools: Sequence[SketchPool],
        bounds: Slo,
        allowed: float = float("inf"),
        coordinator_s: float = COORDINATOR_S,
        seed: int = 0,
    ) -> None:
        self._bounds, self._allowed, self._coordinator_s = bounds, allowed, coordinator_s
        self.workers, self.events = list[SketchWorker](), EventQueue()
        limits = LifecycleLimits()
        self.pools, self._queue = Pools(limits), RequestQueue(limits.starving_s)
        self._machine = _Machine(1, limits, self.pools, self._queue)
        self._machine.dispatched = self._dispatched
        self._placement = Placement("hybrid", self._queue, self.pools, self._machine, 0)
        self.worker_of: dict[WorkerRecord, SketchWorker] = {}
        self._reporting: dict[Place, list[WorkerRecord]] = {}
        draw, opening = Random(seed), list[tuple[float, int, SketchWorker, SketchPool, int]]()
        for index, pool in enumerate(pools):
            for number in range(pool.count):
                draw.getrandbits(PROCESS_BITS)
                phase = (1 + int(HEARTBEAT_S * TICKS_BEGIN * draw.random())) / TICKS_BEGIN
                worker = SketchWorker(len(self.workers), index, pool.times, self.events, self, phase)
                self.workers.append(worker)
                opening.append((HEARTBEAT_S + phase % HEARTBEAT_S, len(opening), worker, pool, number))
        for _, _, worker, pool, number in sorted(opening):
            both, name = pool.computes and pool.generates, f"{worker.pool}-{number}"
            if pool.computes:
                self.open(worker, "prefill", f"colocated-{name}:prefill" if both else f"prefill-{name}", both)
            if pool.generates:
                self.open(worker, "decode", f"colocated-{name}:decode" if both else f"decode-{name}", both)
        self._sent: dict[SketchWorker, list[Asked]] = {}  # prompts that are sent now, each worker's together
        self._num_pools, self._sent_at = len(pools), 0.0
        self.is_exact = True

    @property
    def is_open(self) -> bool:
        """Whether anything goes on, or is to come."""
        waiting_or_over = self.known.num_ended + len(self._queue)
        return bool(self._machine.assignments.by_dispatch) or waiting_or_over < len(self._arrivals)

    def requests(self) -> list[Asked]:
        """Those that have come and not ended."""
        found = *self._machine.assignments.by_dispatch.values(), *self._queue
        return [request for request in found if isinstance(request, Asked)]

    def open(self, worker: SketchWorker, role: Role, name: str, both: bool = False) -> None:
        """Have a worker take new work in this role; and in no other, unless it takes ``both``. Its name, by
        which ties are broken, is the simulator's."""
        times, incarnation = worker.times, len(self.worker_of) + 1
        hello = Hello(
            worker_id=name,
            incarnation=incarnation,
            role=role,
            host="sketched",
            pid=worker.number + 1,
            model=identity_of(times.memory),
            max_model_len=times.memory.longest,
            vocab_size=1 << 30,
            num_blocks=times.memory.num_blocks,
            max_num_seqs=times.max_num_seqs,
            max_batch_tokens=times.max_batch_tokens,
            process=str(worker.number) if both else "",
            mixed=both,
        )
        self.pools.add(hello, 0.0)
        record = self.pools.workers[name, incarnation]
        self.worker_of[record] = worker
        self._reporting[worker] = [record, *(self._reporting.get(worker, ()) if both else ())]
        worker.heartbeat.begin(both or role == "decode")

    def run(self, arrivals: Sequence[Arrival]) -> Sketched:
        self._arrivals, events = arrivals, self.events
        self.known, self._missed = known, _ = Sketched(), [0] * len(self._bounds.parts)
        events.now = began_at = WARM_UP_S
        events.at(self._arrives_at(0), self._arrive, 0)
        events.after(TICK_S, self._tick, began_at - TICK_S)
        events.run_while(arrivals.__len__ if self._allowed == inf else self._may_go_on)
        known.elapsed_s, known.is_exact = events.now - began_at, self.is_exact
        for pool in range(self._num_pools):
            of = [w for w in self.workers if w.pool == pool]
            known.busy_s.append((sum(w.prefill_s for w in of), sum(w.decode_s for w in of)))
        return known

    def _may_go_on(self) -> bool:
        return self.known.num_ended - self.known.num_good <= self._allowed

    # --- the coordinator -------------------------------------------------------------------------

    def _arrives_at(self, number: int) -> float:
        arrivals = self._arrivals
        return WARM_UP_S + arrivals[number].at_s - arrivals[0].at_s + self._coordinator_s

    def _arrive(self, number: int) -> None:
        arrival, now = self._arrivals[number], self.events.now
        if (number + 1) % COLLAPSE_EVERY == 0:
            collapse_heap()
        if number + 1 < len(self._arrivals):
            self.events.at(self._arrives_at(number + 1), self._arrive, number + 1)
        if arrival.num_prompt >= self.pools.max_sequence_tokens:
            self.known.num_refused += 1
            self._count([True] * len(self._missed))
            return
        most = self.pools.max_sequence_tokens - arrival.num_prompt
        prompt, params = range(arrival.num_prompt), sampling(min(arrival.num_output, most))
        request = Asked(str(number), prompt, params, NO_SINK, now - self._coordinator_s, inf)
        request.number, request.asked, request.left, request.first = number, arrival, arrival.num_new, 0.0
        self._placement.place(request, now)

    def _dispatched(self, request: Asked, prefill: WorkerRecord, decode: WorkerRecord) -> None:
        """The coordinator sends a prompt to a prefill worker."""
        source, sent = self.worker_of[prefill], self._sent
        request.source, request.place = source, self.worker_of[decode]
        request.begun, request.num_kept, request.joined_at = False, 0, 0.0
        if self._sent_at < self.events.now:
            self._sent_at = self.events.now
            sent.clear()
        if not sent.get(source):  # nothing, or what has come already
            self.events.after(source.times.message_s, source.receive, sent.setdefault(source, []))
        sent[source].append(request)

    def reported(self, worker: Place, num_free: int) -> None:
        for record in self._reporting[worker]:
            record.report(_load(record, num_free))  # of a worker of both roles, the one that generates first
            self._place_waiting()

    def _tick(self, charged_at: float) -> None:
        """The coordinator's. It charges requests, all of one tenant, and tries those that wait anew."""
        if (now := self.events.now) - charged_at >= CHARGE_EVERY_S:
            charged_at = now
            self._queue.charge_running(())
        self._place_waiting()
        if self.is_open:
            self.events.after(TICK_S, self._tick, charged_at)

    def _place_waiting(self) -> None:
        if self._queue.num_tokens:
            self._placement.place_waiting(self.events.now)

    def first(self, request: Asked) -> None:
        """Its first token has come."""
        request.first = request.first or self.events.now
        if request.goes_on:
            self._machine.assignments.release_prompt(request)
            self._place_waiting()
        else:
            self.over([request])

    def joined(self, request: Asked) -> None:
        self._machine.assignments.release_blocks(request)
        self._place_waiting()

    def over(self, requests: Sequence[Asked]) -> None:
        """Their last tokens have come."""
        for request in requests:
            self._machine.assignments.unassign(request)
            self.note(request)
        self._place_waiting()

    def note(self, request: Asked) -> None:
        """It has ended."""
        asked, known, num_output, now = request.asked, self.known, request.num_output, self.events.now
        ttft_s, rest_s, e2e_s = request.first - request.arrival, now - request.first, now - request.arrival
        tpot_s = rest_s / max(1, num_output - 1)
        self.is_exact &= ttft_s < GIVEN_UP_S
        known.ttft_s.append(ttft_s)
        known.tpot_s.append(tpot_s)
        known.e2e_s.append(e2e_s)
        missed = []
        for part in self._bounds.parts:
            m = part.most(asked.num_prompt, asked.num_output)
            late = ttft_s > m.ttft or tpot_s > m.tpot or rest_s > m.tpot_all * num_output or e2e_s > m.e2e
            missed.append(late)
        self._count(missed)

    def lost(self, request: Asked) -> None:
        """Its decode worker had no block for it: what is not cached of it is computed anew."""
        size = request.place.times.memory.block_size
        request.left = request.num_tokens - request.asked.num_prompt // size * size
        self.is_exact = False
        self._machine.assignments.unassign(request)
        self._queue.add(request)
        self._place_waiting()

    def refused(self, request: Asked) -> None:
        """It never fits."""
        self.is_exact = False
        self._machine.assignments.unassign(request)
        self.known.num_refused += 1
        self._count([True] * len(self._missed))
        self._place_waiting()

    def _count(self, missed: list[bool]) -> None:
        known = self.known
        known.num_ended += 1
        for index, one in enumerate(missed):
            self._missed[index] += one
        known.num_good = known.num_ended - self._bounds.failed(self._missed)


def _load(record: WorkerRecord, num_free: int) -> Load:
    """Return a heartbeat with this number of free blocks."""
    return Load(
        worker_id=record.id[0], incarnation=record.id[1], blocks_free=num_free, blocks_cached=0,
        blocks_used=0, blocks_leased=0, num_running=0, num_waiting=0, num_waiting_tokens=0, steps=0,
        busy=True, accepting=has_spare(num_free, record.num_blocks),
    )  # fmt: skip
