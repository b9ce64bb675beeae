"""Running sequences leave a decode worker that drains, with their KV blocks, for another one. Pure; times in
seconds. Those on a process that prefers prompts, borrowed or from before a flip, leave for one with room to
spare.

Few at a time: a sequence stands still until the other worker has its blocks, and the others run on meanwhile.
A sequence that cannot move (no other worker, no room) runs on too, until the draining worker's own deadline
gives it back.
"""

from __future__ import annotations

from ...transport.messages.messages import Move
from .actions import Action, Send
from .limits import LifecycleLimits, is_move_lost
from .pools import Pools
from .request import Request
from .routing import Need, Policy, choose_decode, holding
from .state_machine import RequestStateMachine
from .worker import WorkerRecord

MAX_MOVES = 4
"""At a time from one worker."""
RETRY_S = 0.5
"""After a move of a sequence was given up."""
SPARE = 0.3
"""Share of the rows and of the blocks that stays free where such a sequence goes."""


class Evacuation:
    """Decides which sequences move, and where to."""

    def __init__(
        self,
        incarnation: int,
        limits: LifecycleLimits,
        policy: Policy,
        pools: Pools,
        machine: RequestStateMachine,
    ) -> None:
        self._incarnation, self._limits, self._policy = incarnation, limits, policy
        self._pools, self._machine = pools, machine

    def evacuate(self, now: float) -> list[Action]:
        """Begin and give up moves from all of these; requests on their way to a draining one are retried
        elsewhere."""
        actions: list[Action] = []
        for worker in self._pools.of_role("decode"):
            if not (worker.draining or (worker.is_reserve and worker.dispatches)):
                continue
            if others := [w for w in self._pools.open_of_role("decode") if w.kind == worker.kind]:
                for request in self._machine.assignments.of(worker):
                    may_leave = worker.draining and request.state == "prefill"
                    if may_leave and any(w.has(request.adapter) for w in others):
                        actions += self._machine.retry(request, "its decode worker leaves", now, counts=False)
                actions += self._move_sequences(worker, now)
        return actions

    def _move_sequences(self, worker: WorkerRecord, now: float) -> list[Action]:
        actions: list[Action] = []
        here = [
            request
            for request in self._machine.assignments.of(worker)
            if request.decode is worker and request.state == "decode" and not request.needs_prompt_logprobs
        ]
        for request in here:
            if request.move is not None and is_move_lost(request, self._limits, now):
                actions += self._machine.give_up_move(request, now)
        num_free = MAX_MOVES - sum(request.move is not None for request in here)
        waiting = [
            request for request in here if request.move is None and now - request.move_failed_at >= RETRY_S
        ]
        for request in waiting[: max(0, num_free)]:
            if (target := self._target(request, worker)) is not None:
                actions.append(self._begin_move(request, worker, target, now))
        return actions

    def _begin_move(self, request: Request, worker: WorkerRecord, target: WorkerRecord, now: float) -> Action:
        move = self._machine.assignments.begin_move(request, target, now)
        spec = request.spec(self._incarnation, now, move.dispatch)
        return Send(worker.id, Move(dispatch=request.dispatch, spec=spec, decode=target.peer))

    def _target(self, request: Request, worker: WorkerRecord) -> WorkerRecord | None:
        open_ones = self._pools.open_of_role("decode")
        others = [w for w in open_ones if w.kind == worker.kind and w.has(request.adapter)]
        if request.images:
            others = [w for w in others if w.hello.takes_images]
        able = holding(request, [w for w in others if w.room >= request.num_tokens], others)
        if not worker.draining:
            able = [w for w in able if w.share_left(w.blocks_for(request.num_tokens)) > SPARE]
        return choose_decode(self._policy, able, Need.of(request, worker, request.dispatch)) if able else None
