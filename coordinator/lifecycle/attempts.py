"""How attempts at a request end: done, tried again, or given up, each with its workers told. Pure."""

from __future__ import annotations

from collections import deque

from ...transport.messages.messages import FinishReason
from .failing_stage import FailingStage
from .flight import End, Flight
from .limits import passed_deadline
from .recovery import Recovery, RecoveryLog
from .request import Ended, ErrorKind
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
        self.proven = False  # a request has gone prefill, handoff, decode
        self.failing = FailingStage()
        self.num_redispatched = 0
        self.last_retries: deque[str] = deque(maxlen=20)
        """Which requests had to be dispatched again, and why: for people."""
        self.recoveries = RecoveryLog()
        self.num_deadlines: dict[str, int] = dict.fromkeys(("queue", "prefill", "handoff", "decode"), 0)

    def retry(self, flight: Flight, reason: str, now: float, counts: bool = True, of_network: bool = False) -> None:
        """A new epoch: prompt plus the tokens the client has. The first is at once, later ones after a while, and rather elsewhere."""
        flight.avoid = flight.decode if counts else None
        self.detach(flight, now)
        flight.early, flight.early_finish = [], None
        self._state.suspicion.credit(flight)
        flight.num_failures += counts
        if flight.num_failures >= self._state.limits.max_attempts + (MORE_FOR_THE_NETWORK if of_network else 0):
            self.failing.failed(flight.stage, reason)
            self.fail(flight, "failed", f"gave up after {flight.num_failures} failed attempts; the last: {reason}", now)
            return
        if counts and flight.num_failures > 1:
            flight.not_before = now + min(LONGEST_RETRY_S, RETRY_S * 4 ** (flight.num_failures - 2))
        self.num_redispatched += 1
        self.last_retries.append(f"{flight.request.request_id} in {flight.stage}: {reason}")
        if flight.recovery is None:
            flight.recovery = Recovery(flight.request.request_id, reason, now, flight.num_tokens)
        flight.enter("queue", now)
        self._state.line.join(flight)

    def expire(self, flight: Flight, reason: str, now: float) -> None:
        """It has passed a deadline."""
        self.num_deadlines[flight.stage] += 1
        if not flight.tokens and flight.request.deadline - flight.request.arrival >= ENOUGH_TIME_S:
            self.failing.failed(flight.stage, reason)
        self.fail(flight, "deadline", reason, now)

    def expire_if_late(self, flight: Flight, now: float) -> bool:
        """Ends a request that has passed one of its deadlines."""
        if passed := passed_deadline(flight, self._state.limits, now):
            self.expire(flight, passed, now)
        return bool(passed)

    def finish(self, flight: Flight, reason: FinishReason, now: float) -> None:
        self.proven = self.proven or flight.stage == "decode"
        self.failing.passed(flight.stage)
        self._detach_move(flight)
        self._state.table.unassign(flight)
        self.end(flight, Ended(finish_reason=reason), now)

    def fail(self, flight: Flight, error: ErrorKind, message: str, now: float) -> None:
        self.detach(flight, now)
        retry_after = 1.0 if error in ("unavailable", "overloaded") else None
        self.end(flight, Ended(error=error, message=message, retry_after_s=retry_after), now)

    def end(self, flight: Flight, ended: Ended, now: float) -> None:
        """It is over; ``ended`` is completed with what is known of it here."""
        del self._state.table.flights[flight.request.request_id]
        if flight.stage == "queue":
            self._state.line.leave(flight)
        self._state.line.charge(flight)
        self._state.suspicion.forget(flight)
        flight.ledger.close(now)
        ended.num_cached_tokens, ended.num_output_tokens = flight.num_cached_tokens or 0, len(flight.tokens)
        ended.num_dispatches, ended.ledger = flight.num_attempts, flight.ledger
        ended.prefill_worker, ended.decode_worker = flight.route
        ended.num_prompt_tokens, ended.model = len(flight.request.prompt_token_ids), flight.model
        self._state.actions.append(End(flight.request, ended))

    def detach(self, flight: Flight, now: float) -> None:
        """The workers are to drop this dispatch; whatever they still say of it is old."""
        self._state.book_stall(flight, now)
        if flight.dispatch >= 0:
            for worker in (flight.prefill, flight.decode):
                self._state.disown(worker, [flight.dispatch])
        self._detach_move(flight)
        self._state.table.unassign(flight)

    def _detach_move(self, flight: Flight) -> None:
        if flight.move is not None:
            for worker in (flight.decode, flight.move.target):
                self._state.disown(worker, [flight.move.dispatch])
