"""The pool controller on the planner's sketch of a cluster: the shipped core, and at least ten times as fast
as the simulator. A worker that changes its role takes new work in the new one at once, and ends what it has.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...coordinator.lifecycle.snapshot import FinishedRequest, RunningRequest, Snapshot, WorkerState
from ...planner.search.sketch import Sketch, Sketched, SketchPool
from ...planner.search.sketched_request import Arrival, Asked
from ...planner.search.sketched_worker import SketchWorker
from ...planner.simulator.simulation import WARM_UP_S
from ...planner.simulator.slo import Slo
from ...steering.steering import Steering
from ...transport.messages.messages import Load, Role


class SteeredSketch(Sketch):
    """One run of equal flexible workers; the first ``prefill`` of them begin as prefill workers."""

    def __init__(self, pools: Sequence[SketchPool], bounds: Slo, steering: Steering | None) -> None:
        super().__init__(pools, bounds)
        self._steering = steering
        self._roles: dict[int, Role] = {self.worker_of[r].number: r.role for r in self.pools.workers.values()}
        self._changing: set[int] = set()
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

    def _flip(self, worker: SketchWorker, role: Role) -> None:
        record = next(r for r in self.pools.workers.values() if self.worker_of[r] is worker)
        self.open(worker, role, record.hello.worker_id)
        self._roles[worker.number] = role
        self._changing.add(worker.number)
        self.num_flips += 1

    def _snapshot(self) -> Snapshot:
        given: dict[int, int] = {}
        for worker in self.workers:
            steps = worker.num_steps(self.events.now)
            for end, number, request in worker.running:
                given[number] = max(1, request.num_output - (end - steps))
        self._changing -= {w.number for w in self.workers if not self._has_old_work(w)}
        return Snapshot(
            tuple(map(self._state, self.workers)),
            tuple(self._request(r, given.get(r.number, 1)) for r in self.requests()),
            {str(number): True for number in self._changing},
        )  # fmt: skip

    def _has_old_work(self, worker: SketchWorker) -> bool:
        sequences = bool(worker.running or worker.joining or worker.grants.num_granted)
        return sequences if self._roles[worker.number] == "prefill" else bool(worker.prompts or worker.chunks)

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
        name, role = str(worker.number), self._roles[worker.number]
        return WorkerState(
            name, name, role, False, True, False, pending + num_running + worker.grants.num_granted,
            times.max_batch_tokens, times.max_num_seqs, times.memory.num_blocks, load,
        )  # fmt: skip

    def _request(self, request: Asked, count: int) -> RunningRequest:
        asked, first = request.asked, request.first
        if not first:
            return RunningRequest(request.arrival, asked.num_prompt, 0, 0, "prefill", request.arrival, 0.0)
        return RunningRequest(request.arrival, asked.num_prompt, 0, count, "decode", first, self.events.now)


def arrivals_of(requests: Sequence[tuple[float, int, int]]) -> list[Arrival]:
    """``requests``: seconds, prompt tokens and output tokens, by time."""
    return [Arrival(at, prompt, prompt, output) for at, prompt, output in requests]
