"""The pool controller on the planner's sketch of a cluster: the shipped core, and at least ten times as fast
as the simulator. A worker that changes its role takes new work in the new one at once, and ends what it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...coordinator.lifecycle.snapshot import FinishedRequest, RunningRequest, Snapshot, WorkerState
from ...planner.search.sketch import COORDINATOR_S, Arrival, Sketch, Sketched, SketchPool, _Worker
from ...planner.simulator.slo import Slo
from ...steering.steering import Steering
from ...transport.messages.messages import Load, Role

LOOK = -1


class SteeredSketch(Sketch):
    """One run of equal flexible workers; the first ``prefill`` of them begin as prefill workers."""

    def __init__(self, pools: Sequence[SketchPool], bounds: Slo, steering: Steering | None) -> None:
        super().__init__(pools, bounds)
        self._steering = steering
        self._roles: dict[int, Role] = {w.number: "prefill" for w in self._prefills}
        self._roles |= {w.number: "decode" for w in self._decodes}
        self._changing: set[int] = set()
        self._open: dict[int, bool] = {}  # whether it has its first token
        self.num_flips = 0

    def run(self, arrivals: Sequence[Arrival]) -> Sketched:
        if self._steering is not None:
            self._at(arrivals[0].at_s + self._steering.options.every_s, 0, None, LOOK)
        return super().run(arrivals)

    def _arrive(self, request: int) -> None:
        self._open[request] = False
        super()._arrive(request)

    def _computed(self, worker: _Worker, request: int) -> None:
        self._open[request] = True
        super()._computed(worker, request)

    def _end(self, request: int) -> None:
        super()._end(request)
        del self._open[request]
        if self._steering is not None:
            arrival, known = self._arrivals[request], self._known
            tpot_s = known.tpot_s[-1] if arrival.num_output > 1 else None
            ended = FinishedRequest(
                arrival.at_s, arrival.num_prompt, 0, arrival.num_output, known.ttft_s[-1], tpot_s
            )
            self._steering.note(ended, self._now)

    def _join(self, request: int) -> None:
        if request == LOOK:
            self._look()
        else:
            super()._join(request)

    def _look(self) -> None:
        assert self._steering is not None, "otherwise nothing looks"
        for decision in self._steering.look(self._snapshot(), self._now):
            if decision.kind == "flip" and decision.role != "mixed":
                self._flip(self._workers[int(decision.worker)], decision.role)
        if self._known.num_ended < len(self._arrivals):
            self._at(self._now + self._steering.options.every_s, 0, None, LOOK)

    def _flip(self, worker: _Worker, role: Role) -> None:
        old, new = (self._decodes, self._prefills) if role == "prefill" else (self._prefills, self._decodes)
        old.remove(worker)
        new.append(worker)
        self._roles[worker.number] = role
        self._changing.add(worker.number)
        self.num_flips += 1

    def _snapshot(self) -> Snapshot:
        tokens: dict[int, int] = {}
        for worker in self._workers:
            self._follow(worker)
            self._go_on(worker)
            for end, request in worker.running:
                left = math.ceil(end - worker.steps - 1e-6)
                tokens[request] = max(1, self._arrivals[request].num_output - left)
        self._changing -= {w.number for w in self._workers if not self._has_old_work(w)}
        return Snapshot(
            tuple(map(self._state, self._workers)),
            tuple(self._request(r, tokens.get(r, 1), begun) for r, begun in self._open.items()),
            {str(number): True for number in self._changing},
        )  # fmt: skip

    def _has_old_work(self, worker: _Worker) -> bool:
        prompts = bool(worker.prompts or worker.chunks)
        return bool(worker.held) if self._roles[worker.number] == "prefill" else prompts

    def _state(self, worker: _Worker) -> WorkerState:
        times, blocks = worker.times, worker.held_tokens // 64
        load = Load(
            worker_id=str(worker.number), incarnation=1, blocks_free=0, blocks_cached=0, blocks_used=blocks,
            blocks_leased=0, num_running=len(worker.running), num_waiting=len(worker.prompts),
            num_waiting_tokens=worker.pending, steps=0, busy=bool(worker.prompts or worker.chunks),
            accepting=True,
        )  # fmt: skip
        name, role = str(worker.number), self._roles[worker.number]
        num_blocks = times.num_tokens // 64
        return WorkerState(
            name, name, role, False, True, False, worker.pending + worker.held,
            times.max_batch_tokens, times.max_num_seqs, num_blocks, load,
        )  # fmt: skip

    def _request(self, request: int, count: int, begun: bool) -> RunningRequest:
        arrival, first = self._arrivals[request], self._first[request]
        if not begun:
            return RunningRequest(arrival.at_s, arrival.num_prompt, 0, 0, "prefill", arrival.at_s, 0.0)
        return RunningRequest(arrival.at_s, arrival.num_prompt, 0, count, "decode", first, self._now)


def arrivals_of(requests: Sequence[tuple[float, int, int]]) -> list[Arrival]:
    """``requests``: seconds, prompt tokens and output tokens, by time."""
    return [Arrival(at + COORDINATOR_S, prompt, prompt, output) for at, prompt, output in requests]
