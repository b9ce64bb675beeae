"""Which worker gets which waiting request. Pure.

A request waits until a prefill worker and a decode worker that fit together have room for it.
"""

from __future__ import annotations

from ..transport.messages import Prefill
from .flight import Flight, Send
from .lifecycle_state import LifecycleState
from .pools import Worker
from .routing import Need, Policy, choose_decode, choose_pair, choose_prefill, fits


class Placement:
    """Dispatches from the head of the waiting line."""

    def __init__(self, state: LifecycleState, policy: Policy) -> None:
        self._state, self._policy = state, policy
        self._failed: tuple[int, int] | None = None  # when the last pass over the line found nothing: who waited, and who was here
        self._shortest = 0  # of the prompts that found no prefill worker in it
        self._unsure = False  # whether anything but that kept a request waiting

    def serve_line(self, now: float) -> None:
        """Dispatches what finds room."""
        state = self._state
        if not len(state.line) or self._is_hopeless():
            return
        if any(not w.draining and w.has_room_for(1) for w in state.pools.of_role("decode")):
            self._shortest, self._unsure = 1 << 62, state.line.anybody_returns or len(state.suspicion) > 0
            before = state.line.num_changes
            state.table.eased.clear()
            state.line.serve(lambda flight: self._place(flight, now), now)
            nothing = before == state.line.num_changes and not self._unsure
            self._failed = (before, state.pools.num_changes) if nothing else None

    def _is_hopeless(self) -> bool:
        """Nothing has changed since the last pass that could help: it was for the lack of a prefill worker with room for the shortest."""
        state = self._state
        if self._failed != (state.line.num_changes, state.pools.num_changes):
            return False
        return not any(self._has_room_for_new(worker, self._shortest) for worker in state.table.eased)

    def join_line(self, flight: Flight, now: float) -> None:
        """A new request waits, if it has to."""
        state = self._state
        hopeless = self._is_hopeless() and flight.num_tokens >= self._shortest
        state.line.join(flight)
        if hopeless:
            self._failed = (state.line.num_changes, state.pools.num_changes)
        else:
            self.serve_line(now)

    def serve_at_once(self, flight: Flight, now: float) -> bool:
        """Dispatches a new request, if nobody waits before it and it finds room; otherwise it has to join the line."""
        if len(self._state.line) or not self._place(flight, now):
            return False
        self._state.line.pass_by(flight)
        return True

    def _place(self, flight: Flight, now: float) -> bool:
        num_tokens, pools = flight.num_tokens, self._state.pools
        prefills = [w for w in pools.of_role("prefill") if not w.draining and self._prefill_has_room(w, flight, num_tokens)]
        if not prefills:
            self._shortest = min(self._shortest, num_tokens)
            return False
        self._unsure = True
        decodes = [w for w in pools.of_role("decode") if not w.draining and w.has_room_for(num_tokens)]
        if not decodes:
            return False
        if flight.avoid is not None:
            decodes = [w for w in decodes if w is not flight.avoid and w.kind == flight.avoid.kind] or decodes
        if len(self._state.suspicion):
            prefills, decodes = self._state.suspicion.allowed(flight, prefills), self._state.suspicion.allowed(flight, decodes)
        if prefills:
            kinds = {w.kind for w in decodes}
            prefills = [w for w in prefills if w.kind in kinds]
        if pools.has_mixed:
            prefills, decodes = _that_may_pair(prefills, decodes)
        if not prefills or not decodes:
            return False
        prefill, decode = self._choose(flight, num_tokens, prefills, decodes)
        if prefill is None or decode is None:
            return False
        self._dispatch(flight, prefill, decode, now)
        return True

    def _choose(
        self, flight: Flight, num_tokens: int, prefills: list[Worker], decodes: list[Worker]
    ) -> tuple[Worker | None, Worker | None]:
        if len(prefills) == len(decodes) == 1:  # no choice: what is cached where does not matter
            return prefills[0], decodes[0]
        need = Need(num_tokens, flight.hashes(prefills[0]), flight.request.session, self._state.table.next_dispatch)
        if self._state.pools.has_mixed:
            return choose_pair(self._policy, prefills, decodes, need)
        prefill = choose_prefill(self._policy, prefills, need)
        return prefill, choose_decode(self._policy, [w for w in decodes if prefill and w.kind == prefill.kind], need)

    def _prefill_has_room(self, worker: Worker, flight: Flight, num_tokens: int) -> bool:
        if worker.num_others:
            self._unsure = True
        if not worker.accepting and worker.dispatches:
            self._unsure = True
            return False
        if flight.num_attempts:  # it goes before those that are computed for the first time
            ahead = self._state.limits.queued_batches * worker.max_batch_tokens
            waiting = self._returning_tokens(worker)
            return waiting == 0 or waiting + num_tokens <= ahead
        return self._has_room_for_new(worker, num_tokens)

    def _has_room_for_new(self, worker: Worker, num_tokens: int) -> bool:
        ahead = self._state.limits.queued_batches * worker.max_batch_tokens
        return worker.pending_tokens + num_tokens <= ahead or not worker.is_ahead_of(num_tokens, ahead)

    def _returning_tokens(self, worker: Worker) -> int:
        """Of prompts dispatched to this prefill worker and not yet computed, those of requests that have come back."""
        flights = self._state.table.by_dispatch
        return sum(num_tokens for dispatch, num_tokens in worker.pending.items() if flights[dispatch].num_attempts > 1)

    def _dispatch(self, flight: Flight, prefill: Worker, decode: Worker, now: float) -> None:
        self._state.table.assign(flight, prefill, decode)
        if flight.recovery is not None:
            flight.recovery.dispatched = now
            flight.recovery.absent_s = max(0.0, self._state.gap_ended - flight.recovery.noticed)
            flight.recovery.num_attempts += 1
        flight.enter("prefill", now)
        self._state.actions.append(Send(prefill.id, Prefill(spec=flight.spec(self._state.incarnation, now), decode=decode.peer)))


def _that_may_pair(prefills: list[Worker], decodes: list[Worker]) -> tuple[list[Worker], list[Worker]]:
    """Those of either role that fit one of the other."""
    paired = [p for p in prefills if any(fits(p, d) for d in decodes)]
    return paired, [d for d in decodes if any(fits(p, d) for p in paired)]
