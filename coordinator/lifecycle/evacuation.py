"""Running sequences leave a decode worker that drains, with their KV blocks, for another one. Pure.

A few at a time: a sequence stands still from its turn until the other worker has its blocks, and the rest run on meanwhile. One that cannot
go (no other worker, no room) runs on too, until the worker's own deadline gives it back.
"""

from __future__ import annotations

from ...transport.messages.messages import Cancel, Move, u32
from .actions import Action, Send
from .assignments import Assignments
from .pools import Pools
from .request import Request
from .routing import Need, Policy, choose_decode, that_hold
from .worker import Worker

AT_ONCE = 4
"""Sequences on their way from one worker."""
TRY_AGAIN_S = 0.5
LONGEST_S = 30.0
"""The workers' own deadlines end a move much earlier; this is for when both have gone mad."""


class Evacuation:
    """Orders moves, and ends those that cannot succeed."""

    def __init__(self, table: Assignments, pools: Pools, policy: Policy, coordinator: int, lost_after_s: float) -> None:
        self._table, self._pools, self._policy = table, pools, policy
        self._coordinator, self._lost_after_s = coordinator, lost_after_s
        self.num_moved = 0
        self.num_given_up = 0

    def has_successor(self, worker: Worker) -> bool:
        """Whether there is any decode worker that could take over."""
        return any(w.kind == worker.kind for w in self._pools.open_of_role("decode"))

    def misdirected(self, worker: Worker) -> list[Request]:
        """Requests whose prompts are being computed for this worker, which leaves."""
        requests = [self._table.by_dispatch[d] for d in sorted(worker.dispatches)]
        return [f for f in requests if f.state == "prefill"]

    def orders(self, worker: Worker, now: float) -> list[Action]:
        """What is to move next from this worker, and which moves are over."""
        actions: list[Action] = []
        requests = [self._table.by_dispatch[d] for d in sorted(worker.dispatches)]
        here = [f for f in requests if f.decode is worker and f.state == "decode" and not f.needs_prompt_logprobs]
        for request in here:
            if request.move is not None and self.is_lost(request, now):
                actions += self.give_up(request, now)
        room = AT_ONCE - sum(f.move is not None for f in here)
        waiting = [f for f in here if f.move is None and now - f.move_failed_at >= TRY_AGAIN_S]
        for request in waiting[: max(0, room)]:
            actions += self._order(request, worker, now)
        return actions

    def give_up(self, request: Request, now: float) -> list[Action]:
        """The sequence goes on where it is; whoever holds something of the move lets go of it."""
        move = self._table.end_move(request)
        if move is None:
            return []
        self.num_given_up += 1
        request.move_failed_at = now
        cancel = Cancel(coordinator=self._coordinator, dispatches=u32([move.dispatch]))
        return [Send(w.id, cancel) for w in (request.decode, move.target) if w is not None and w.id in self._pools.workers]

    def is_lost(self, request: Request, now: float) -> bool:
        """Of its move: both workers have reported since they had time to hear of it, and not named it (who is silent may have it). Or it
        takes too long."""
        move = request.move
        assert move is not None, "it moves"
        told_by, ends = move.since + self._lost_after_s, (request.decode, move.target)
        lost = all(w is None or (w.held_at >= told_by and move.dispatch not in w.held) for w in ends)
        return lost or now - move.since > LONGEST_S

    def arrived(self, request: Request, now: float) -> None:
        """The target runs it."""
        self.num_moved += 1
        self._table.complete_move(request)
        request.enter("decode", now)
        if request.times is not None:
            request.times.moved()

    def handed_over(self, request: Request, now: float) -> None:
        """Its worker has left and holds nothing: the target has taken it over, and will say so."""
        self.num_moved += 1
        self._table.complete_move(request)
        request.enter("handoff", now)

    def _order(self, request: Request, worker: Worker, now: float) -> list[Action]:
        target = self._choose(request, worker)
        if target is None:
            return []
        move = self._table.begin_move(request, target, now)
        order = Move(dispatch=request.dispatch, spec=request.spec(self._coordinator, now, move.dispatch), decode=target.peer)
        return [Send(worker.id, order)]

    def _choose(self, request: Request, worker: Worker) -> Worker | None:
        others = [w for w in self._pools.open_of_role("decode") if w.kind == worker.kind]
        able = that_hold(request.max_tokens, [w for w in others if w.room >= request.num_tokens], others)
        if not able:
            return None
        return choose_decode(self._policy, able, Need.of(request, worker, request.dispatch))
