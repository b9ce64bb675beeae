"""How attempts at a request end: done, tried again, or given up, each with its workers told. Pure."""

from __future__ import annotations

from ...transport.messages.messages import FinishReason
from .actions import End
from .limits import passed_deadline
from .outcomes import Outcomes, Recovery
from .request import Ended, ErrorKind, Request
from .state import LifecycleState

RETRY_S, LONGEST_RETRY_S = 0.25, 4.0
"""Before the second retry of a request that fails, then four times as long before each one after it; never longer."""
ENOUGH_TIME_S = 10.0
"""A request with less time that has no token at its deadline says nothing of the system."""
MORE_FOR_THE_NETWORK = 3
"""A request whose handoff fails may fail so many times more: nothing is wrong with it, and a network in trouble for seconds outlasts the
first waits, which add up to 1.25 s (these three more: to 13 s)."""


class Attempts:
    """Ends attempts, and requests."""

    def __init__(self, state: LifecycleState) -> None:
        self._state = state
        self.outcomes = Outcomes()

    def retry(self, request: Request, reason: str, now: float, counts: bool = True, of_network: bool = False) -> None:
        """A new epoch: prompt plus the tokens the client has. The first is at once, later ones after a while, and rather elsewhere."""
        request.avoid = request.decode if counts else None
        self.detach(request, now)
        request.held_back, request.held_back_finish = [], None
        self._state.suspicion.credit(request)
        request.num_failures += counts
        if request.num_failures >= self._state.limits.max_attempts + (MORE_FOR_THE_NETWORK if of_network else 0):
            self.outcomes.failing.failed(request.state, reason)
            self.fail(request, "failed", f"gave up after {request.num_failures} failed attempts; the last: {reason}", now)
            return
        if counts and request.num_failures > 1:
            request.not_before = now + min(LONGEST_RETRY_S, RETRY_S * 4 ** (request.num_failures - 2))
        self.outcomes.retried(request.request_id, request.state, reason)
        if request.recovery is None:
            request.recovery = Recovery(request.request_id, reason, now, request.num_tokens)
        request.enter("queue", now)
        self._state.line.join(request)

    def expire(self, request: Request, reason: str, now: float) -> None:
        """It has passed a deadline."""
        self.outcomes.num_deadlines[request.state] += 1
        if not request.tokens and request.deadline - request.arrival >= ENOUGH_TIME_S:
            self.outcomes.failing.failed(request.state, reason)
        self.fail(request, "deadline", reason, now)

    def expire_if_late(self, request: Request, now: float) -> bool:
        """Ends a request that has passed one of its deadlines."""
        if passed := passed_deadline(request, self._state.limits, now):
            self.expire(request, passed, now)
        return bool(passed)

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        self.outcomes.finished(request.state)
        self._detach_move(request)
        self._state.table.unassign(request)
        self.end(request, Ended(finish_reason=reason), now)

    def fail(self, request: Request, error: ErrorKind, message: str, now: float) -> None:
        self.detach(request, now)
        retry_after = 1.0 if error in ("unavailable", "overloaded") else None
        self.end(request, Ended(error=error, message=message, retry_after_s=retry_after), now)

    def end(self, request: Request, ended: Ended, now: float) -> None:
        """It is over; ``ended`` is completed with what is known of it here."""
        del self._state.table.requests[request.request_id]
        if request.state == "queue":
            self._state.line.leave(request)
        self._state.line.charge(request)
        self._state.suspicion.forget(request)
        request.ledger.close(now)
        ended.num_cached_tokens, ended.num_output_tokens = request.num_cached_tokens or 0, len(request.tokens)
        ended.num_dispatches, ended.ledger = request.num_attempts, request.ledger
        ended.prefill_worker, ended.decode_worker = request.route
        ended.num_prompt_tokens, ended.model = len(request.prompt_token_ids), request.model
        self._state.actions.append(End(request, ended))

    def detach(self, request: Request, now: float) -> None:
        """The workers are to drop this dispatch; whatever they still say of it is old."""
        self._state.book_stall(request, now)
        if request.dispatch >= 0:
            for worker in (request.prefill, request.decode):
                self._state.disown(worker, [request.dispatch])
        self._detach_move(request)
        self._state.table.unassign(request)

    def _detach_move(self, request: Request) -> None:
        if request.move is not None:
            for worker in (request.decode, request.move.target):
                self._state.disown(worker, [request.move.dispatch])
