"""The pool controller on the planner's sketch of a cluster: the shipped core, and at least ten times as fast
as the simulator. A worker that changes its role takes new work in the new one as soon as it has learnt of it,
gives back the prompts that it has not begun, and hands its sequences over, as in the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify

from ...coordinator.lifecycle.actions import Action, Send
from ...coordinator.lifecycle.evacuation import Evacuation
from ...coordinator.lifecycle.limits import LifecycleLimits
from ...coordinator.lifecycle.request import Request
from ...coordinator.lifecycle.snapshot import FinishedRequest, RunningRequest, Snapshot, WorkerState
from ...coordinator.lifecycle.worker import WorkerRecord
from ...planner.search.sketch import NOTHING, Sketch, Sketched, SketchPool
from ...planner.search.sketched_request import Arrival, Asked
from ...planner.search.sketched_worker import SketchWorker
from ...planner.simulator.simulation import WARM_UP_S
from ...planner.simulator.slo import Slo
from ...steering.steering import Steering
from ...transport.messages.messages import Load, Role


class _Moves(Evacuation):
    """Orders moves between workers here, without a message."""

    ordered: Callable[[Asked, WorkerRecord], None]

    def _begin_move(self, request: Request, worker: WorkerRecord, target: WorkerRecord, now: float) -> Action:
        assert isinstance(request, Asked), "all requests are"
        self._machine.assignments.begin_move(request, target, now)
        self.ordered(request, worker)
        return Send(worker.id, NOTHING)


class SteeredSketch(Sketch):
    """One run of equal flexible workers; the first ``prefill`` of them begin as prefill workers. ``flip_s``:
    from an order to change its role until a worker obeys it."""

    def __init__(
        self, pools: Sequence[SketchPool], bounds: Slo, steering: Steering | None, flip_s: float = 0.0
    ) -> None:
        super().__init__(pools, bounds)
        self._steering, self._flip_s = steering, flip_s
        self._records = {self.worker_of[record]: record for record in self.pools.workers.values()}
        self._names = {worker: record.hello.worker_id for worker, record in self._records.items()}
        self._leaving: dict[SketchWorker, WorkerRecord] = {}  # in their old role
        self._moves = _Moves(1, LifecycleLimits(), "hybrid", self.pools, self._machine)
        self._moves.ordered = self._move
        self.num_flips = 0

    def run(self, arrivals: Sequence[Arrival]) -> Sketched:
        if self._steering is not None:
            self.events.at(WARM_UP_S + self._steering.options.every_s, self._look)
        return super().run(arrivals)

    def note(self, request: Asked) -> None:
        super().note(request)
        if self._steering is not None:
            asked, known = request.asked, self.known
            tpot_s = known.tpot_s[-1] if asked.num_output > 1 else None
            ended = FinishedRequest(
                request.arrival, asked.num_prompt, 0, asked.num_output, known.ttft_s[-1], tpot_s
            )
            self._steering.note(ended, self.events.now)

    def _look(self) -> None:
        assert self._steering is not None, "otherwise nothing looks"
        for decision in self._steering.look(self._snapshot(), self.events.now):
            if decision.kind == "flip" and decision.role != "mixed":
                self._flip(self.workers[int(decision.worker)], decision.role)
        if self.is_open:
            self.events.after(self._steering.options.every_s, self._look)

    # --- a change of role ------------------------------------------------------------------------

    def _flip(self, worker: SketchWorker, role: Role) -> None:
        self._leaving[worker] = record = self._records[worker]
        self.pools.close(record, None)
        self.num_flips += 1
        self.events.after(worker.times.message_s + self._flip_s, self._obey, worker, role)

    def _obey(self, worker: SketchWorker, role: Role) -> None:
        if role == "decode":
            back = [one[2] for one in worker.prompts if not one[2].begun]
            worker.prompts = [one for one in worker.prompts if one[2].begun]
            heapify(worker.prompts)
            self.events.after(worker.times.message_s, self._given_back, back)
        self.events.after(worker.times.message_s, self._begins, worker, role)

    def _given_back(self, requests: list[Asked]) -> None:
        for request in requests:
            self._machine.assignments.unassign(request)
            self._queue.add(request)
        self._place_waiting()

    def _begins(self, worker: SketchWorker, role: Role) -> None:
        before = set(self.pools.workers.values())
        self.open(worker, role, f"{self._names[worker]}:{role}")
        (self._records[worker],) = set(self.pools.workers.values()) - before
        self._evacuate()
        self._place_waiting()

    def _has_old_work(self, worker: SketchWorker, record: WorkerRecord) -> bool:
        if record.role == "decode":
            return bool(record.dispatches)
        return bool(worker.prompts or worker.chunks or worker.handoffs.open)

    # --- its sequences ---------------------------------------------------------------------------

    def _tick(self, charged_at: float) -> None:
        self._evacuate()
        super()._tick(charged_at)

    def _evacuate(self) -> None:
        if self._leaving:
            self._moves.evacuate(self.events.now)

    def _move(self, request: Asked, record: WorkerRecord) -> None:
        worker = self.worker_of[record]
        self.events.after(worker.times.message_s, self._pause, request, worker)

    def _pause(self, request: Asked, worker: SketchWorker) -> None:
        """It leaves the batch with the end of the step that runs; one that ends with that stays."""
        if request in worker.joining:
            worker.joining.remove(request)
            self._offer(request, worker)
        elif (one := next((one for one in worker.running if one[2] is request), None)) is not None:
            worker._interrupt()
            left = one[0] - worker.steps
            if left <= worker.due:
                return
            worker.running.remove(one)
            heapify(worker.running)
            worker._leave(request, request.num_output - left)
            request.tokens = [0] * (request.num_output - left + worker.due - 1)
            worker.blocks.num_free -= worker.blocks.num_for(request.num_tokens)
            self.events.at(worker.ends_at, self._offer, request, worker)

    def _offer(self, request: Asked, worker: SketchWorker) -> None:
        assert request.move is not None, "it moves"
        request.source, request.place = worker, self.worker_of[request.move.target]
        worker._num_begun += 1
        worker.handoffs.begin(request)
        handoff = worker.handoffs.open[request]
        handoff.is_computed, handoff.num_ready = True, handoff.num_blocks

    def joined(self, request: Asked) -> None:
        if request.move is None:
            request.state = "decode"
            super().joined(request)
        else:
            self._machine.assignments.complete_move(request)
            self._evacuate()
            self._place_waiting()

    def lost(self, request: Asked) -> None:
        request.state = "queue"
        super().lost(request)

    # --- what the controller sees ----------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        given: dict[int, int] = {}
        for worker in self.workers:
            steps = worker.num_steps(self.events.now)
            for end, number, request in worker.running:
                given[number] = max(1, request.num_output - (end - steps))
        changing = {}
        for worker, record in list(self._leaving.items()):
            if (has_begun := self._records[worker] is not record) and not self._has_old_work(worker, record):
                self.pools.remove(record, "")
                del self._leaving[worker]
            else:
                changing[str(worker.number)] = has_begun
        return Snapshot(
            tuple(map(self._state, self.workers)),
            tuple(self._request(r, given.get(r.number, len(r.tokens) + 1)) for r in self.requests()),
            changing,
        )

    @staticmethod
    def _pending(worker: SketchWorker) -> int:
        """Prompt tokens that are to be computed."""
        return sum(one[2].left for one in worker.prompts) + sum(request.left for request, _ in worker.chunks)

    def _state(self, worker: SketchWorker) -> WorkerState:
        times, num_running, pending = worker.times, worker.num_rows, self._pending(worker)
        blocks = times.memory.num_blocks - worker.free_blocks(self.events.now)
        load = Load(
            worker_id=str(worker.number), incarnation=1, blocks_free=0, blocks_cached=0, blocks_used=blocks,
            blocks_leased=0, num_running=num_running, num_waiting=len(worker.prompts),
            num_waiting_tokens=pending, steps=worker.num_steps(self.events.now),
            busy=pending > 0, accepting=True,
        )  # fmt: skip
        name, record = str(worker.number), self._records[worker]
        return WorkerState(
            name, name, record.role, False, record.listed is not None, record.draining,
            len(record.dispatches), times.max_batch_tokens, times.max_num_seqs, times.memory.num_blocks, load,
        )  # fmt: skip

    def _request(self, request: Asked, count: int) -> RunningRequest:
        asked, first = request.asked, request.first
        if not first:
            return RunningRequest(request.arrival, asked.num_prompt, 0, 0, "prefill", request.arrival, 0.0)
        return RunningRequest(request.arrival, asked.num_prompt, 0, count, "decode", first, self.events.now)


def arrivals_of(requests: Sequence[tuple[float, int, int]]) -> list[Arrival]:
    """``requests``: seconds, prompt tokens and output tokens, by time."""
    return [Arrival(at, prompt, prompt, output) for at, prompt, output in requests]
