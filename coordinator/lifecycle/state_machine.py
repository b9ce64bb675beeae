"""The states of a request, and every transition between them. Pure.

    state     event                                    next state  actions
    --------  ---------------------------------------  ----------  ---------------------------------------
    queue     a pair of workers has room               prefill     Send Prefill, under a new epoch and
                                                                   dispatch number; SendPrefix to one that
                                                                   has more of the prompt cached
    queue     it is new, and a worker keeps its        handoff     Send Resume, under a dispatch number
              answer
    prefill   FirstToken                               handoff     Push
    prefill*  Joined                                   decode      Push, if Joined overtook the first token
    handoff   Joined                                   decode
    decode    StepTokens                               decode      Push for each new token
    decode    its worker drains, another has room      decode      Send Move, under a second dispatch number
    decode    Joined from the target of the move       decode      the second dispatch is the only one now
    decode    its drained worker left during a move    handoff     the target has the blocks, sends Joined
    any**     RequestFailed; a worker, a token, or     queue       Send Cancel to both workers; the next
              the whole dispatch is lost                           attempt sends the prompt and the tokens
                                                                   that the client has
    any       last token, refused, cancelled, failed   ended       End; Send Cancel to workers that may
              too often, a deadline passed                         still hold it

    *  messages of two workers come in any order       **  except queue, which has no dispatch

    state     deadline                                         owner
    --------  -----------------------------------------------  -------------------------------------------
    queue     queue_timeout_s                                  coordinator
    queue     unserved_s, while a role has no worker           coordinator
    prefill   prefill_timeout_s                                coordinator
    handoff   handoff_timeout_s                                coordinator; the workers' leases are shorter
    decode    token_timeout_s after the newest token           coordinator
    a move    MAX_MOVE_S                                       coordinator; the workers' limits are shorter
    any**     lost_after_s without a report of the dispatch    coordinator
    any       the request's own deadline                       coordinator, and the worker that has it

Each attempt has its own dispatch number, so that a late message of an earlier attempt names an unknown
dispatch, and is dropped. Output tokens carry their index: each index reaches the client once, in order.
``request.move`` is a part of the state "decode".
"""

from __future__ import annotations

from collections.abc import Iterable

from ...transport.messages.messages import Cancel, FinishReason, Message, Prefill, Resume, SendPrefix, u32
from .actions import Action, End, Send
from .assignments import Assignments
from .limits import LifecycleLimits, is_lost, min_timeout, no_deadline_before, passed_deadline
from .outcomes import Outcomes, Recovery
from .pools import Pools
from .request import Ended, ErrorKind, Request
from .request_queue import RequestQueue
from .routing import PrefixSource
from .suspicion import Suspicion
from .time_ledger import MIN_STALL_S, AttemptTimes, OwnStalls
from .worker import WorkerRecord

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.25, 4.0
"""Delay before the second retry of a failing request; quadrupled for each further one. The first retry is
at once."""
MIN_TIME_S = 10.0
"""A request with less time than this may miss its deadline without anything being wrong with the system."""
MORE_HANDOFF_FAILURES = 3
"""Allowed beyond ``max_attempts`` where the handoff fails. The request is innocent, and a network in
trouble outlasts the first delays, which add up to 1.25 s; these three more make 13 s."""


class RequestStateMachine:
    """Carries out transitions. Each method returns the actions of its transition."""

    def __init__(self, incarnation: int, limits: LifecycleLimits, pools: Pools, queue: RequestQueue) -> None:
        self._incarnation, self._limits = incarnation, limits
        self._pools, self._queue = pools, queue
        self.assignments = Assignments()
        self.suspicion = Suspicion(limits)
        self.outcomes = Outcomes()
        self.stalls = OwnStalls(max(limits.heartbeat_s, MIN_STALL_S))
        self._min_timeout_s = min_timeout(limits)
        self._next_deadline = float("inf")  # no request passes a deadline before this time

    # --- forward -------------------------------------------------------------------------------------

    def admit(self, request: Request, now: float) -> None:
        """Register a new request. Placement dispatches or queues it."""
        request.admit(now)
        self.assignments.requests[request.request_id] = request
        self._next_deadline = min(self._next_deadline, request.deadline, now + self._min_timeout_s)

    def dispatch(
        self,
        request: Request,
        prefill: WorkerRecord,
        decode: WorkerRecord,
        now: float,
        source: PrefixSource | None,
    ) -> list[Action]:
        """queue -> prefill: begin an attempt on these workers, with the cached blocks of another one."""
        self.assignments.assign(request, prefill, decode)
        self.outcomes.num_borrowed_prompts += prefill.is_reserve
        self.outcomes.num_borrowed_sequences += decode.is_reserve
        if (recovery := request.recovery) is not None:
            recovery.dispatched = now
            recovery.absent_s = max(0.0, self._pools.gap_ended - recovery.noticed)
            recovery.num_attempts += 1
        self.stalls.book(request.ledger, request.state, now)
        request.enter("prefill", now)
        request.times = AttemptTimes(request.ledger)
        spec, hashes = request.spec(self._incarnation, now), source.hashes if source else []
        images = request.images
        prompt = Prefill(spec=spec, decode=decode.peer, num_prefix_blocks=len(hashes), images=images)
        actions: list[Action] = [Send(prefill.id, prompt)]
        if source is not None:
            self.outcomes.num_pulls += 1
            order = SendPrefix(
                coordinator=self._incarnation,
                dispatch=request.dispatch,
                block_hashes=b"".join(hashes),
                prefill=prefill.peer,
            )
            actions.append(Send(source.worker.id, order))
        return actions

    def resume(self, request: Request, worker: WorkerRecord, now: float) -> Action:
        """queue -> handoff: have a worker send the answer that it keeps, and go on with it."""
        self.assignments.assign_kept(request, worker)
        self.outcomes.num_resumed += 1
        self.stalls.book(request.ledger, request.state, now)
        request.enter("handoff", now)
        order = Resume(
            coordinator=self._incarnation,
            dispatch=request.dispatch,
            request_id=request.request_id,
            answer_id=request.answer_id,
            deadline_s=max(0.0, request.deadline - now),
        )
        return Send(worker.id, order)

    def prompt_computed(self, request: Request, queue_s: float, prefill_s: float, now: float) -> None:
        """prefill -> handoff. ``queue_s``, ``prefill_s``: as the prefill worker measured them."""
        if request.state == "prefill":
            request.enter("handoff", now)
        if request.times is not None:
            request.times.first_token(self.stalls.milestone(queue_s + prefill_s, now), prefill_s)
        if request.recovery is not None:
            request.recovery.queue_s, request.recovery.prefill_s = queue_s, prefill_s
        self.assignments.release_prompt(request)

    def joined(self, request: Request, transfer_s: float, now: float) -> None:
        """prefill or handoff -> decode. ``transfer_s``: from the first token to the join, as measured by the
        decode worker."""
        if request.state != "decode":
            request.enter("decode", now)
            if request.times is not None:
                request.times.joined(self.stalls.milestone(transfer_s, now))
        self.assignments.release_prompt(request)
        self.assignments.release_blocks(request)

    def complete_move(self, request: Request, now: float) -> None:
        """decode -> decode: the target of its move runs the sequence."""
        self.outcomes.num_moved += 1
        self.assignments.complete_move(request)
        request.enter("decode", now)
        if request.times is not None:
            request.times.moved()

    def hand_over(self, request: Request, now: float) -> None:
        """decode -> handoff: its drained worker has left, so the target has the blocks and will send
        Joined."""
        self.outcomes.num_moved += 1
        self.assignments.complete_move(request)
        request.enter("handoff", now)

    def give_up_move(self, request: Request, now: float) -> list[Action]:
        """Stay in decode where it is. Both ends drop what they hold of the move."""
        move = self.assignments.end_move(request)
        if move is None:
            return []
        self.outcomes.num_moves_given_up += 1
        request.move_failed_at = now
        return self.cancel_at((request.decode, move.target), [move.dispatch])

    # --- back to the queue ---------------------------------------------------------------------------

    def retry(
        self, request: Request, reason: str, now: float, *, counts: bool = True, in_handoff: bool = False
    ) -> list[Action]:
        """Any state with a dispatch -> queue, or ended after too many failures in a row.

        ``counts``: it counts as a failure of the request; the next attempt then prefers another decode
        worker. ``in_handoff``: the handoff failed, which is forgiven more often.
        """
        request.avoid = request.decode if counts else None
        actions = self.detach(request, now)
        request.held_back, request.held_back_finish = [], None
        self.suspicion.credit(request)
        request.num_failures += counts
        if request.num_failures >= self._limits.max_attempts + (MORE_HANDOFF_FAILURES if in_handoff else 0):
            self.outcomes.failing_stage.failed(request.state, reason)
            message = f"gave up after {request.num_failures} failed attempts; the last: {reason}"
            return actions + self.fail(request, "failed", message, now)
        if counts and request.num_failures > 1:
            delay_s = MIN_RETRY_DELAY_S * 4 ** (request.num_failures - 2)
            request.not_before = now + min(MAX_RETRY_DELAY_S, delay_s)
        self.outcomes.retried(request.request_id, request.state, reason)
        if request.recovery is None:
            request.recovery = Recovery(request.request_id, reason, now, request.num_tokens)
        request.enter("queue", now)
        self._queue.add(request)
        return actions

    def retry_lost(self, now: float) -> list[Action]:
        """Retry every request that no worker holds, by the workers' own reports."""
        by_dispatch = self.assignments.by_dispatch
        unreported = (d for worker in self._pools.of_role("decode") for d in worker.dispatches - worker.held)
        # a move has two dispatches
        requests = dict.fromkeys(by_dispatch[dispatch] for dispatch in sorted(unreported))
        old = now - self._limits.lost_after_s  # a younger state is not lost
        lost = [r for r in requests if r.dispatch >= 0 and r.entered <= old and is_lost(r, self._limits, now)]
        return [a for request in lost for a in self.retry(request, "the workers hold nothing of it", now)]

    # --- to the end ----------------------------------------------------------------------------------

    def finish(
        self, request: Request, reason: FinishReason, stage_s: float | None, now: float
    ) -> list[Action]:
        """End a request with its last token. ``stage_s``: length of its last stage, if the worker sent it."""
        if request.times is not None and stage_s is not None:
            request.times.ended(self.stalls.milestone(stage_s, now))
        self.outcomes.finished(request.state)
        actions = self._cancel_move(request)
        self.assignments.unassign(request)
        return [*actions, self._end(request, Ended(finish_reason=reason), now)]

    def fail(self, request: Request, error: ErrorKind, message: str, now: float) -> list[Action]:
        """End a request with an error."""
        retry_after = 1.0 if error in ("unavailable", "overloaded") else None
        return self.cancel(request, now, Ended(error=error, message=message, retry_after_s=retry_after))

    def miss_deadline(self, request: Request, reason: str, now: float) -> list[Action]:
        """End a request that has passed a deadline."""
        self.outcomes.num_deadlines[request.state] += 1
        if not request.tokens and request.deadline - request.arrival >= MIN_TIME_S:
            self.outcomes.failing_stage.failed(request.state, reason)
        return self.fail(request, "deadline", reason, now)

    def end_late(self, now: float) -> list[Action]:
        """End every request that has passed a deadline."""
        if now < self._next_deadline:
            return []
        actions: list[Action] = []
        for request in list(self.assignments.requests.values()):
            if reason := passed_deadline(request, self._limits, now):
                actions += self.miss_deadline(request, reason, now)
        requests = self.assignments.requests.values()
        self._next_deadline = min(
            (no_deadline_before(r, self._min_timeout_s) for r in requests), default=float("inf")
        )
        return actions

    def cancel(self, request: Request, now: float, ended: Ended | None = None) -> list[Action]:
        """End a request, wherever it stands. Without ``ended``: its client has gone, or has enough."""
        return [*self.detach(request, now), self._end(request, ended or Ended(), now)]

    def _end(self, request: Request, ended: Ended, now: float) -> Action:
        """Forget the request, and complete ``ended`` with what is known of it."""
        del self.assignments.requests[request.request_id]
        if request.state == "queue":
            self._queue.remove(request)
        self._queue.charge(request)
        if request.suspect:
            self.suspicion.forget(request)
        request.ledger.close(now)
        ended.num_cached_tokens, ended.num_output_tokens = request.num_cached_tokens or 0, len(request.tokens)
        ended.num_dispatches, ended.ledger = request.num_attempts, request.ledger
        ended.prefill_worker, ended.decode_worker = request.route
        ended.num_prompt_tokens, ended.model = len(request.prompt_token_ids), request.model
        ended.embedding = request.embedding
        return End(request, ended)

    # --- parts ---------------------------------------------------------------------------------------

    def detach(self, request: Request, now: float) -> list[Action]:
        """End the attempt. Both workers drop its dispatch; what they still send of it is out of date."""
        self.stalls.book(request.ledger, request.state, now)
        actions = self._cancel_move(request)
        if request.dispatch >= 0:
            actions = self.cancel_at((request.prefill, request.decode), [request.dispatch]) + actions
        self.assignments.unassign(request)
        return actions

    def _cancel_move(self, request: Request) -> list[Action]:
        move = request.move
        return [] if move is None else self.cancel_at((request.decode, move.target), [move.dispatch])

    def cancel_at(self, workers: Iterable[WorkerRecord | None], dispatches: list[int]) -> list[Action]:
        """Have those of the workers that are still here drop these dispatches."""
        cancel: Message = Cancel(coordinator=self._incarnation, dispatches=u32(dispatches))
        return [Send(w.id, cancel) for w in workers if w is not None and w.id in self._pools.workers]
