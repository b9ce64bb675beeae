"""Every request's life, from submission to its one terminal event, whatever dies on the way. Pure.

    queue --place--> prefill --FirstToken--> handoff --Joined--> decode --last token--> end
      ^                 |                       |                  |
      +---- a new epoch: prompt plus the tokens the client has ----+

A request is dispatched late: it waits here until a prefill worker and a decode worker have room. Each attempt is a new epoch under a new
dispatch number, so that whatever an older attempt still says names a dispatch that is unknown, and is dropped. Output tokens carry
their index: each index reaches the client once, in order. Coordinator and workers compare notes with every heartbeat: a dispatch that
no worker holds is lost and tried again; one that a worker holds and nobody wants is cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ..transport.handoff import Wait
from ..transport.messages import (
    Alive,
    BlockEvents,
    Cancel,
    Drain,
    Fenced,
    FinishReason,
    FirstToken,
    Goodbye,
    Hello,
    Joined,
    Load,
    Message,
    Prefill,
    RequestFailed,
    StepTokens,
    TokenLogprobs,
    Welcome,
    from_u32,
    u32,
)
from .evacuation import Evacuation
from .flight import Action, End, Flight, Push, PushPromptLogprobs, Send
from .flight_table import FlightTable
from .lifecycle_limits import LifecycleLimits as LifecycleLimits
from .lifecycle_limits import passed_deadline
from .pools import Pools, Worker, WorkerId
from .request import Ended, ErrorKind, GenerationRequest
from .routing import Need, Policy, choose_decode, choose_prefill
from .suspicion import Suspicion
from .waiting_line import WaitingLine

RETRY_S = 0.25
"""Before the second retry of a request that fails; four times as long before each one after it."""
DRAINED = "drained"
"""Why a worker that left in good order is gone."""


class Lifecycle:
    """The coordinator's decisions. Feed it messages, submissions and ``tick``; carry out what each call returns."""

    def __init__(self, incarnation: int, policy: Policy, limits: LifecycleLimits | None = None) -> None:
        self.incarnation = incarnation
        self.limits = limits or LifecycleLimits()
        self.pools = Pools(self.limits.dead_after_s, self.limits.progress_timeout_s, self.limits.unreachable_s)
        self.proven = False  # a request has gone prefill, handoff, decode
        self._policy = policy
        self._table = FlightTable()
        self._flights, self._by_dispatch = self._table.flights, self._table.by_dispatch
        self._line = WaitingLine(self.limits.starving_s)
        self._suspicion = Suspicion(self._table, self.limits)
        self._evacuation = Evacuation(self._table, self.pools, policy, incarnation, self.limits.lost_after_s)
        self._fenced: dict[WorkerId, float] = {}
        self._unserved_since: float | None = None
        self._expected_until = float("-inf")  # who left in good order is expected back by then
        self._ticked: float | None = None
        self._actions: list[Action] = []
        self.reasons_lost: dict[WorkerId, str] = {}
        self.num_redispatched = 0
        self.last_retries: deque[str] = deque(maxlen=20)
        """Which requests had to be dispatched again, and why: for people."""
        self.num_workers_lost = 0
        self.num_workers_left = 0
        self.num_deadlines: dict[str, int] = dict.fromkeys(("queue", "prefill", "handoff", "decode"), 0)

    # --- from the HTTP side ----------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return len(self._line)

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    def counters(self) -> dict[str, float]:
        """Cumulative since the start."""
        return {
            "redispatches": self.num_redispatched,
            "workers_lost": self.num_workers_lost,
            "workers_left": self.num_workers_left,
            "sequences_moved": self._evacuation.num_moved,
            "moves_given_up": self._evacuation.num_given_up,
            **{f"deadlines_{stage}": count for stage, count in self.num_deadlines.items()},
        }

    def waits(self) -> Iterator[Wait]:
        """Every request here."""
        for request_id, flight in self._flights.items():
            yield Wait(request_id, flight.stage, flight.request.deadline)

    def request_ids(self, dispatches: Iterable[int]) -> list[str]:
        """The requests behind these dispatches, for people."""
        return self._table.request_ids(dispatches)

    def refusal(self, now: float) -> str:
        """Why new requests are turned away, as a sentence; empty where they are taken. While workers that left in good order are
        expected back, requests wait."""
        return self.pools.gap if now >= self._expected_until else ""

    def drain(self, worker_id: str, timeout_s: float | None) -> tuple[Worker | None, list[Action]]:
        """A person wants this worker to leave: it gets no new work from now on. None: no such worker is here."""
        worker = next((w for w in self.pools.workers.values() if w.hello.worker_id == worker_id), None)
        if worker is not None:
            worker.draining, worker.drain = True, Drain(coordinator=self.incarnation, timeout_s=timeout_s)
            self._actions.append(Send(worker.id, worker.drain))
        return worker, self._take()

    def submit(self, request: GenerationRequest, now: float) -> list[Action]:
        """Takes a request in, or ends it at once."""
        longest = self.pools.max_sequence_tokens
        if refusal := self.refusal(now):
            return [End(request, Ended(error="unavailable", message=refusal, retry_after_s=1.0))]
        if self.num_queued >= self.limits.max_queue:
            ended = Ended(error="overloaded", message=f"{self.num_queued} requests are waiting already", retry_after_s=1.0)
            return [End(request, ended)]
        if len(request.prompt_token_ids) > longest - 1 and request.sampling.max_tokens > 0:
            message = f"the prompt has {len(request.prompt_token_ids)} tokens; the workers have room for {longest - 1} and one answer token"
            return [End(request, Ended(error="refused", message=message))]
        flight = Flight(request, now, owes_prompt_logprobs=request.prompt_logprobs is not None)
        self._flights[request.request_id] = flight
        self._line.join(flight)
        self._pump(now)
        return self._take()

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """The client has gone, or has enough."""
        flight = self._flights.get(request_id)
        if flight is not None:
            self._detach(flight)
            self._end(flight, Ended(), now)
            self._pump(now)
        return self._take()

    # --- from the workers ------------------------------------------------------------------------

    def receive(self, worker_id: WorkerId, message: Message, now: float) -> list[Action]:
        """Any message of a worker. One that is not known (dead to us, or of a time before our restart) is fenced."""
        if isinstance(message, Hello):
            self._hello(worker_id, message, now)
            return self._take()
        worker = self.pools.workers.get(worker_id)
        if worker is None:
            self._fence(worker_id, now)
        elif isinstance(message, StepTokens):
            self._step_tokens(worker, message, now)
        elif isinstance(message, Load):
            self._load(worker, message, now)
        elif isinstance(message, BlockEvents):
            self.pools.book(message)
        elif isinstance(message, Goodbye):
            self._goodbye(worker, now)
        elif isinstance(message, FirstToken | Joined | RequestFailed) and message.coordinator == self.incarnation:
            self._progress(worker, message, now)
            self._pump(now)
        return self._take()

    def worker_ended(self, worker_id: WorkerId, now: float) -> list[Action]:
        """Its process is known to have ended."""
        worker = self.pools.workers.get(worker_id)
        if worker is not None and worker.draining:
            self._goodbye(worker, now)  # its own goodbye may still be on the way
        elif worker is not None:
            self._lose(worker, "its process has ended", now)
            self._pump(now)
        return self._take()

    def reached(self, worker_id: WorkerId, connected: bool, now: float) -> None:
        """Something was sent to this worker, over a connection that is there, or not."""
        worker = self.pools.workers.get(worker_id)
        if worker is not None:
            worker.unreached_since = None if connected else worker.unreached_since if worker.unreached_since is not None else now

    def tick(self, now: float) -> list[Action]:
        """At least ten times a second: dead workers, deadlines, lost dispatches, the queue."""
        self._forgive_own_stall(now)
        for worker, reason in self.pools.dead(now):
            self._lose(worker, reason, now)
        for worker in self.pools.overdue(self.limits.heartbeat_s, now):
            self._actions.append(Send(worker.id, Alive(coordinator=self.incarnation)))  # whether it can be reached shows in sending
        self._serve_or_give_up(now)
        self._suspicion.credit_all()
        for flight in list(self._flights.values()):
            if passed := passed_deadline(flight, self.limits, now):
                self.num_deadlines[flight.stage] += 1
                self._fail(flight, "deadline", passed, now)
            elif self._is_lost(flight, now):
                self._retry(flight, "the workers hold nothing of it", now)
        self._evacuate(now)
        self._pump(now)
        return self._take()

    def _forgive_own_stall(self, now: float) -> None:
        """A worker was not silent while nobody listened."""
        if self._ticked is not None and (stall := now - self._ticked) > self.limits.heartbeat_s:
            self.pools.forgive(stall)
        self._ticked = now

    # --- workers come and go ---------------------------------------------------------------------

    def _hello(self, worker_id: WorkerId, hello: Hello, now: float) -> None:
        if worker_id != (hello.worker_id, hello.incarnation):
            return  # the socket says another name than the message
        for replaced in self.pools.add(hello, now):
            self._lose(replaced, "restarted", now)
        self._welcome(worker_id)
        self._pump(now)

    def _welcome(self, worker_id: WorkerId) -> None:
        self._actions.append(Send(worker_id, Welcome(coordinator=self.incarnation, heartbeat_s=self.limits.heartbeat_s)))

    def _fence(self, worker_id: WorkerId, now: float) -> None:
        if now - self._fenced.get(worker_id, -1e9) >= 1.0:
            self._fenced = {w: t for w, t in self._fenced.items() if now - t < 60.0}
            self._fenced[worker_id] = now
            fenced = Fenced(coordinator=self.incarnation, reason="this incarnation is not known, or was declared dead")
            self._actions.append(Send(worker_id, fenced))

    def _lose(self, worker: Worker, reason: str, now: float) -> None:
        self.pools.remove(worker)
        self.num_workers_lost += 1
        self._remember_lost(worker, reason)
        told = f"{worker.role} worker {worker.hello.worker_id} was lost ({reason})"
        for flight in self._suspicion.charge(worker):
            died = f"{flight.num_deaths} workers in a row died while they ran this request, the last time alone"
            self._fail(flight, "failed", f"{died}; it is not tried again. The last: {told}", now)
        self._give_back(worker, told, now)

    def _goodbye(self, worker: Worker, now: float) -> None:
        """A worker that drained has left."""
        self.pools.remove(worker)
        self.num_workers_left += 1
        self._expected_until = now + self.limits.unserved_s
        self._remember_lost(worker, DRAINED)
        self._give_back(worker, f"{worker.role} worker {worker.hello.worker_id} has left", now, drained=True)
        self._pump(now)

    def _give_back(self, worker: Worker, reason: str, now: float, drained: bool = False) -> None:
        """What was assigned to a worker that is here no more is tried elsewhere. That is no fault of the requests."""
        for dispatch in sorted(worker.dispatches):
            flight = self._by_dispatch[dispatch]
            if flight.move is not None and flight.move.target is worker:
                self._actions += self._evacuation.give_up(flight, now)
            elif flight.stage == "decode" and worker is flight.prefill:
                flight.prefill = None
            elif flight.move is not None and drained:
                self._evacuation.handed_over(flight, now)
            else:
                self._retry(flight, reason, now, counts=False)

    def _remember_lost(self, worker: Worker, reason: str) -> None:
        self.reasons_lost = {**dict(list(self.reasons_lost.items())[-63:]), worker.id: reason}

    def _evacuate(self, now: float) -> None:
        """Decode workers that drain hand over what they run; prompts that are computed for them go elsewhere."""
        for worker in self.pools.of_role("decode"):
            if worker.draining and self._evacuation.has_successor(worker):
                for flight in self._evacuation.misdirected(worker):
                    self._retry(flight, "its decode worker leaves", now, counts=False)
                self._actions += self._evacuation.orders(worker, now)

    def _load(self, worker: Worker, load: Load, now: float) -> None:
        self.pools.hear(load, now)
        held = set(from_u32(load.dispatches))
        worker.held = held
        self._actions.append(Send(worker.id, Alive(coordinator=self.incarnation)))
        if worker.drain is not None:  # it has not heard yet
            self._actions.append(Send(worker.id, worker.drain))
        if load.num_cache_reports > worker.num_cache_reports and now - worker.asked_for_cache >= self.limits.lost_after_s:
            worker.asked_for_cache = now
            self._welcome(worker.id)
        orphans = sorted(d for d in held if d not in self._by_dispatch)
        if orphans:
            self._actions.append(Send(worker.id, Cancel(coordinator=self.incarnation, dispatches=u32(orphans))))
        if worker.draining:
            self._evacuate(now)
        self._pump(now)

    def _is_lost(self, flight: Flight, now: float) -> bool:
        """No worker that should hold this dispatch has reported it, though each had time to."""
        if flight.dispatch < 0 or now - flight.mark < self.limits.lost_after_s:
            return False
        holders = {"prefill": [flight.prefill], "handoff": [flight.prefill, flight.decode], "decode": [flight.decode]}[flight.stage]
        return not any(w is not None and flight.dispatch in w.held for w in holders)

    # --- a request's progress --------------------------------------------------------------------

    def _progress(self, worker: Worker, message: FirstToken | Joined | RequestFailed, now: float) -> None:
        flight = self._by_dispatch.get(message.dispatch)
        if flight is not None and flight.move is not None and message.dispatch == flight.move.dispatch:
            self._move_progress(flight, worker, message, now)
        elif flight is None or worker not in (flight.prefill, flight.decode):
            self._disown(worker, [message.dispatch])
        elif isinstance(message, FirstToken):
            self._first_token(flight, message, now)
        elif isinstance(message, Joined):
            self._joined(flight, message, now)
        elif not (flight.stage == "decode" and worker is flight.prefill):
            self._failed(flight, message, now)

    def _move_progress(self, flight: Flight, worker: Worker, message: FirstToken | Joined | RequestFailed, now: float) -> None:
        """Of a sequence on its way from one decode worker to another."""
        move = flight.move
        assert move is not None
        if isinstance(message, Joined) and worker is move.target:
            self._evacuation.arrived(flight, now)
            self._check_join(flight, message, now)
            self._evacuate(now)
        elif isinstance(message, RequestFailed) and worker in (flight.decode, move.target):
            self._actions += self._evacuation.give_up(flight, now)

    def _first_token(self, flight: Flight, message: FirstToken, now: float) -> None:
        flight.num_cached_tokens = max(flight.num_cached_tokens, message.num_cached_tokens)
        if flight.stage == "prefill":
            flight.enter("handoff", now)
            flight.ledger.previous_began_later(message.queue_s)  # it waited on the worker
        self._table.unpromise_tokens(flight)
        if message.prompt_logprobs is not None and flight.owes_prompt_logprobs:
            flight.owes_prompt_logprobs = False
            self._actions.append(PushPromptLogprobs(flight.request, message.prompt_logprobs))
            self._push_early(flight, now)
        if message.token is None:
            self._finish(flight, "length", now)
        elif message.index == flight.num_received:
            self._push(flight, message.token, message.logprobs, message.finished, now)

    def _joined(self, flight: Flight, message: Joined, now: float) -> None:
        if flight.stage != "decode":
            flight.enter("decode", now)
            # Heard in one breath with the first token, the handoff seems to have taken no time: the decode worker knows better.
            flight.ledger.previous_was("handoff", message.transfer_s)
        self._table.unpromise_tokens(flight)
        self._table.unpromise_blocks(flight)
        self._check_join(flight, message, now)

    def _check_join(self, flight: Flight, message: Joined, now: float) -> None:
        """Joined repeats the newest token."""
        if message.index == flight.num_received:
            self._push(flight, message.token, message.logprobs, None, now)
        elif message.index != flight.num_received - 1:
            self._retry(flight, "the decode worker joined at the wrong token", now)

    def _step_tokens(self, worker: Worker, message: StepTokens, now: float) -> None:
        """The hot path: one call per decode step."""
        if message.coordinator != self.incarnation:
            return
        rows = zip(from_u32(message.dispatches), from_u32(message.indices), from_u32(message.tokens), strict=False)
        finished, logprobs, unknown, ended = message.finished, message.logprobs, [], False
        for row, (dispatch, index, token) in enumerate(rows):
            flight = self._by_dispatch.get(dispatch)
            if flight is None or flight.decode is not worker:
                unknown.append(dispatch)
            elif index != len(flight.tokens) or flight.owes_prompt_logprobs or row in finished:
                self._unusual_row(flight, index, token, logprobs.get(row), finished.get(row), now)
                ended = True
            else:
                flight.tokens.append(token)
                flight.token_at = now
                self._actions.append(Push(flight.request, token, logprobs.get(row) if logprobs else None))
        if unknown:
            self._disown(worker, unknown)
        if ended:
            self._pump(now)

    def _unusual_row(
        self, flight: Flight, index: int, token: int, logprobs: TokenLogprobs | None, reason: FinishReason | None, now: float
    ) -> None:
        if index == flight.num_received:
            self._push(flight, token, logprobs, reason, now)
        elif index > flight.num_received:
            self._retry(flight, f"token {flight.num_received} was lost on the way", now)

    def _push(self, flight: Flight, token: int, logprobs: TokenLogprobs | None, finished: FinishReason | None, now: float) -> None:
        if flight.owes_prompt_logprobs:
            flight.early.append((token, logprobs))
            flight.early_finish = finished
            return
        flight.tokens.append(token)
        flight.token_at = now
        self._actions.append(Push(flight.request, token, logprobs))
        if finished is not None:
            self._finish(flight, finished, now)

    def _push_early(self, flight: Flight, now: float) -> None:
        early, flight.early = flight.early, []
        finished, flight.early_finish = flight.early_finish, None
        for i, (token, logprobs) in enumerate(early):
            self._push(flight, token, logprobs, finished if i == len(early) - 1 else None, now)

    def _failed(self, flight: Flight, message: RequestFailed, now: float) -> None:
        if message.kind == "refused":
            self._fail(flight, "refused", message.message, now)
        elif message.kind == "deadline":
            self.num_deadlines[flight.stage] += 1
            self._fail(flight, "deadline", message.message, now)
        else:
            self._retry(flight, message.message, now, counts=message.kind != "preempted")

    def _retry(self, flight: Flight, reason: str, now: float, counts: bool = True) -> None:
        """A new epoch: prompt plus the tokens the client has. The first is at once, later ones after a while, and rather elsewhere."""
        flight.avoid = flight.decode if counts else None
        self._detach(flight)
        flight.early, flight.early_finish = [], None
        self._suspicion.credit(flight)
        flight.num_failures += counts
        if flight.num_failures >= self.limits.max_attempts:
            self._fail(flight, "failed", f"gave up after {flight.num_failures} failed attempts; the last: {reason}", now)
            return
        if counts and flight.num_failures > 1:
            flight.not_before = now + RETRY_S * 4 ** (flight.num_failures - 2)
        self.num_redispatched += 1
        self.last_retries.append(f"{flight.request.request_id} in {flight.stage}: {reason}")
        flight.enter("queue", now)
        self._line.join(flight)

    # --- ending ----------------------------------------------------------------------------------

    def _finish(self, flight: Flight, reason: FinishReason, now: float) -> None:
        self.proven = self.proven or flight.stage == "decode"
        self._detach_move(flight)
        self._table.unassign(flight)
        self._end(flight, Ended(finish_reason=reason), now)

    def _fail(self, flight: Flight, error: ErrorKind, message: str, now: float) -> None:
        self._detach(flight)
        retry_after = 1.0 if error in ("unavailable", "overloaded") else None
        self._end(flight, Ended(error=error, message=message, retry_after_s=retry_after), now)

    def _end(self, flight: Flight, ended: Ended, now: float) -> None:
        del self._flights[flight.request.request_id]
        if flight.stage == "queue":
            self._line.leave(flight)
        self._suspicion.forget(flight)
        flight.ledger.close(now)
        complete = Ended(
            finish_reason=ended.finish_reason,
            error=ended.error,
            message=ended.message,
            retry_after_s=ended.retry_after_s,
            num_cached_tokens=flight.num_cached_tokens,
            num_output_tokens=len(flight.tokens),
            num_dispatches=flight.num_attempts,
            prefill_worker=flight.route[0],
            decode_worker=flight.route[1],
            ledger=flight.ledger,
        )
        self._actions.append(End(flight.request, complete))

    def _detach(self, flight: Flight) -> None:
        """The workers are to drop this dispatch; whatever they still say of it is old."""
        if flight.dispatch >= 0:
            cancel = Cancel(coordinator=self.incarnation, dispatches=u32([flight.dispatch]))
            for worker in (flight.prefill, flight.decode):
                if worker is not None and worker.id in self.pools.workers:
                    self._actions.append(Send(worker.id, cancel))
        self._detach_move(flight)
        self._table.unassign(flight)

    def _detach_move(self, flight: Flight) -> None:
        if flight.move is not None:
            cancel = Cancel(coordinator=self.incarnation, dispatches=u32([flight.move.dispatch]))
            for worker in (flight.decode, flight.move.target):
                if worker is not None and worker.id in self.pools.workers:
                    self._actions.append(Send(worker.id, cancel))

    def _disown(self, worker: Worker, dispatches: Iterable[int]) -> None:
        self._actions.append(Send(worker.id, Cancel(coordinator=self.incarnation, dispatches=u32(list(dispatches)))))

    # --- placing ---------------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        """Dispatches what finds room."""
        if len(self._line) and any(w.has_room_for(1) for w in self.pools.of_role("decode") if not w.draining):
            self._line.serve(lambda flight: self._place(flight, now), now)

    def _place(self, flight: Flight, now: float) -> bool:
        decodes = [w for w in self.pools.open_of_role("decode") if w.has_room_for(flight.num_tokens)]
        if not decodes:
            return False
        prefills = [w for w in self.pools.open_of_role("prefill") if self._prefill_has_room(w, flight)]
        if flight.avoid is not None:
            decodes = [w for w in decodes if w is not flight.avoid and w.kind == flight.avoid.kind] or decodes
        if len(self._suspicion):
            prefills, decodes = self._suspicion.allowed(flight, prefills), self._suspicion.allowed(flight, decodes)
        kinds = {w.kind for w in decodes}
        prefills = [w for w in prefills if w.kind in kinds]
        if not prefills:
            return False
        need = Need(flight.num_tokens, flight.hashes(prefills[0]), flight.request.session, self._table.next_dispatch)
        prefill = choose_prefill(self._policy, prefills, need)
        decode = choose_decode(self._policy, [w for w in decodes if prefill and w.kind == prefill.kind], need)
        if prefill is None or decode is None:
            return False
        self._dispatch(flight, prefill, decode, now)
        return True

    def _prefill_has_room(self, worker: Worker, flight: Flight) -> bool:
        if worker.load is not None and not worker.load.accepting and worker.dispatches:
            return False
        ahead = self.limits.queued_batches * worker.hello.max_batch_tokens
        if worker.pending_tokens + flight.num_tokens <= ahead:
            return True
        waiting = worker.tokens_ahead_of(flight.num_tokens)
        return waiting == 0 or waiting + flight.num_tokens <= ahead

    def _dispatch(self, flight: Flight, prefill: Worker, decode: Worker, now: float) -> None:
        self._table.assign(flight, prefill, decode)
        flight.enter("prefill", now)
        self._actions.append(Send(prefill.id, Prefill(spec=flight.spec(self.incarnation, now), decode=decode.peer)))

    def _serve_or_give_up(self, now: float) -> None:
        """Admitted requests wait a while for workers to come back, not for ever."""
        if not self.pools.gap:
            self._unserved_since = None
            return
        if self._unserved_since is None:
            self._unserved_since = now
        if now - self._unserved_since > self.limits.unserved_s:
            for flight in self._line:
                self._fail(flight, "unavailable", f"waited {self.limits.unserved_s:g} s: {self.pools.gap}", now)

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
