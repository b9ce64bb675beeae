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

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from ..transport.messages import (
    BlockEvents,
    Cancel,
    Fenced,
    FinishReason,
    FirstToken,
    Hello,
    Joined,
    Load,
    Message,
    Peer,
    Prefill,
    RequestFailed,
    StepTokens,
    TokenLogprobs,
    Welcome,
    from_u32,
    u32,
)
from .flight import Action, End, Flight, Push, PushPromptLogprobs, Send
from .pools import Pools, Worker, WorkerId
from .request import Ended, ErrorKind, GenerationRequest
from .routing import Need, Policy, choose_decode, choose_prefill

LOOK_AHEAD = 32
"""So many requests at the head of the queue are tried when there may be room."""


@dataclass(frozen=True, slots=True)
class LifecycleLimits:
    """Bounds of the coordinator's patience; times in seconds."""

    max_queue: int = 1024
    max_attempts: int = 4
    dead_after_s: float = 1.5
    progress_timeout_s: float = 30.0
    heartbeat_s: float = 0.25
    lost_after_s: float = 1.0  # a dispatch that no worker reports for so long is lost
    unserved_s: float = 30.0  # an admitted request waits so long for a worker to come back
    starving_s: float = 2.0  # who has waited so long is not overtaken any more
    queued_batches: int = 2  # a prefill worker is given work for so many of its steps ahead


class Lifecycle:
    """The coordinator's decisions. Feed it messages, submissions and ``tick``; carry out what each call returns."""

    def __init__(self, incarnation: int, policy: Policy, limits: LifecycleLimits | None = None) -> None:
        self.incarnation = incarnation
        self.limits = limits or LifecycleLimits()
        self.pools = Pools(self.limits.dead_after_s, self.limits.progress_timeout_s)
        self.proven = False  # a request has gone prefill, handoff, decode
        self._policy = policy
        self._flights: dict[str, Flight] = {}
        self._by_dispatch: dict[int, Flight] = {}
        self._queue: list[tuple[int, float, int, Flight]] = []  # sorted by priority, arrival, tie-break
        self._num_submitted = 0
        self._next_dispatch = 1
        self._fenced: dict[WorkerId, float] = {}
        self._unserved_since: float | None = None
        self._ticked: float | None = None
        self._actions: list[Action] = []
        self.reasons_lost: dict[WorkerId, str] = {}
        self.num_redispatched = 0
        self.num_workers_lost = 0

    # --- from the HTTP side ----------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    def counters(self) -> dict[str, float]:
        """Cumulative since the start."""
        return {"redispatches": self.num_redispatched, "workers_lost": self.num_workers_lost}

    def request_ids(self, dispatches: Iterable[int]) -> list[str]:
        """The requests behind these dispatches, for people."""
        return sorted(self._by_dispatch[d].request.request_id for d in dispatches)

    def submit(self, request: GenerationRequest, now: float) -> list[Action]:
        """Takes a request in, or ends it at once."""
        longest = self.pools.max_sequence_tokens
        if self.pools.gap:
            ended = Ended(error="unavailable", message=self.pools.gap, retry_after_s=1.0)
            return [End(request, ended)]
        if self.num_queued >= self.limits.max_queue:
            ended = Ended(error="overloaded", message=f"{self.num_queued} requests are waiting already", retry_after_s=1.0)
            return [End(request, ended)]
        if len(request.prompt_token_ids) > longest - 1 and request.sampling.max_tokens > 0:
            message = f"the prompt has {len(request.prompt_token_ids)} tokens; the workers have room for {longest - 1} and one answer token"
            return [End(request, Ended(error="refused", message=message))]
        flight = Flight(request, now, owes_prompt_logprobs=request.prompt_logprobs is not None)
        self._flights[request.request_id] = flight
        self._enqueue(flight)
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
        elif isinstance(message, FirstToken | Joined | RequestFailed) and message.coordinator == self.incarnation:
            self._progress(worker, message, now)
            self._pump(now)
        return self._take()

    def tick(self, now: float) -> list[Action]:
        """At least ten times a second: dead workers, deadlines, lost dispatches, the queue."""
        self._forgive_own_stall(now)
        for worker, reason in self.pools.dead(now):
            self._lose(worker, reason, now)
        self._serve_or_give_up(now)
        for flight in list(self._flights.values()):
            if now >= flight.request.deadline:
                self._fail(flight, "deadline", "the request's deadline has passed", now)
            elif self._is_lost(flight, now):
                self._retry(flight, "the workers hold nothing of it", now)
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
        welcome = Welcome(coordinator=self.incarnation, heartbeat_s=self.limits.heartbeat_s)
        self._actions.append(Send(worker_id, welcome))
        self._pump(now)

    def _fence(self, worker_id: WorkerId, now: float) -> None:
        if now - self._fenced.get(worker_id, -1e9) >= 1.0:
            self._fenced = {w: t for w, t in self._fenced.items() if now - t < 60.0}
            self._fenced[worker_id] = now
            fenced = Fenced(coordinator=self.incarnation, reason="this incarnation is not known, or was declared dead")
            self._actions.append(Send(worker_id, fenced))

    def _lose(self, worker: Worker, reason: str, now: float) -> None:
        self.pools.remove(worker)
        self.num_workers_lost += 1
        self.reasons_lost = {**dict(list(self.reasons_lost.items())[-63:]), worker.id: reason}
        for dispatch in sorted(worker.dispatches):
            flight = self._by_dispatch[dispatch]
            if flight.stage == "decode" and worker is flight.prefill:
                flight.prefill = None
            else:
                self._retry(flight, f"{worker.role} worker {worker.hello.worker_id} was lost ({reason})", now)

    def _load(self, worker: Worker, load: Load, now: float) -> None:
        self.pools.hear(load, now)
        held = set(from_u32(load.dispatches))
        worker.held = held
        orphans = sorted(d for d in held if d not in self._by_dispatch)
        if orphans:
            self._actions.append(Send(worker.id, Cancel(coordinator=self.incarnation, dispatches=u32(orphans))))
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
        if flight is None or worker not in (flight.prefill, flight.decode):
            self._disown(worker, [message.dispatch])
        elif isinstance(message, FirstToken):
            self._first_token(flight, message, now)
        elif isinstance(message, Joined):
            self._joined(flight, message, now)
        elif not (flight.stage == "decode" and worker is flight.prefill):
            self._failed(flight, message, now)

    def _first_token(self, flight: Flight, message: FirstToken, now: float) -> None:
        flight.num_cached_tokens = max(flight.num_cached_tokens, message.num_cached_tokens)
        if flight.stage == "prefill":
            flight.enter("handoff", now)
            flight.move_time("prefill", "queue", message.queue_s)
        self._unpromise_tokens(flight)
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
            flight.move_time("prefill", "handoff", message.transfer_s - flight.seconds["handoff"])
        self._unpromise_tokens(flight)
        self._unpromise_blocks(flight)
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
            self._fail(flight, "deadline", message.message, now)
        else:
            self._retry(flight, message.message, now, counts=message.kind != "preempted")

    def _retry(self, flight: Flight, reason: str, now: float, counts: bool = True) -> None:
        """A new epoch: prompt plus the tokens the client has, anywhere."""
        self._detach(flight)
        flight.early, flight.early_finish = [], None
        flight.num_failures += counts
        if flight.num_failures >= self.limits.max_attempts:
            self._fail(flight, "failed", f"gave up after {flight.num_failures} failed attempts; the last: {reason}", now)
            return
        self.num_redispatched += 1
        flight.enter("queue", now)
        self._enqueue(flight)

    # --- ending ----------------------------------------------------------------------------------

    def _finish(self, flight: Flight, reason: FinishReason, now: float) -> None:
        self.proven = self.proven or flight.stage == "decode"
        self._unassign(flight)
        self._end(flight, Ended(finish_reason=reason), now)

    def _fail(self, flight: Flight, error: ErrorKind, message: str, now: float) -> None:
        self._detach(flight)
        retry_after = 1.0 if error in ("unavailable", "overloaded") else None
        self._end(flight, Ended(error=error, message=message, retry_after_s=retry_after), now)

    def _end(self, flight: Flight, ended: Ended, now: float) -> None:
        del self._flights[flight.request.request_id]
        self._unqueue(flight)
        flight.enter(flight.stage, now)
        complete = Ended(
            finish_reason=ended.finish_reason,
            error=ended.error,
            message=ended.message,
            retry_after_s=ended.retry_after_s,
            num_cached_tokens=flight.num_cached_tokens,
            num_output_tokens=len(flight.tokens),
            num_dispatches=flight.epoch + 1,
            stages=flight.stages(),
        )
        self._actions.append(End(flight.request, complete))

    def _detach(self, flight: Flight) -> None:
        """The workers are to drop this dispatch; whatever they still say of it is old."""
        if flight.dispatch >= 0:
            cancel = Cancel(coordinator=self.incarnation, dispatches=u32([flight.dispatch]))
            for worker in (flight.prefill, flight.decode):
                if worker is not None and worker.id in self.pools.workers:
                    self._actions.append(Send(worker.id, cancel))
        self._unassign(flight)

    def _unassign(self, flight: Flight) -> None:
        self._unpromise_tokens(flight)
        self._unpromise_blocks(flight)
        for worker in (flight.prefill, flight.decode):
            if worker is not None:
                worker.dispatches.discard(flight.dispatch)
        self._by_dispatch.pop(flight.dispatch, None)
        flight.prefill = flight.decode = None
        flight.dispatch = -1

    def _unpromise_tokens(self, flight: Flight) -> None:
        if flight.prefill is not None:
            flight.prefill.pending.pop(flight.dispatch, None)

    def _unpromise_blocks(self, flight: Flight) -> None:
        if flight.decode is not None:
            flight.decode.pending_blocks -= flight.pending_blocks
        flight.pending_blocks = 0

    def _disown(self, worker: Worker, dispatches: Iterable[int]) -> None:
        self._actions.append(Send(worker.id, Cancel(coordinator=self.incarnation, dispatches=u32(list(dispatches)))))

    # --- placing ---------------------------------------------------------------------------------

    def _enqueue(self, flight: Flight) -> None:
        self._num_submitted += 1
        bisect.insort(self._queue, (flight.request.priority, flight.request.arrival, self._num_submitted, flight))

    def _unqueue(self, flight: Flight) -> None:
        if flight.dispatch < 0:
            self._queue = [entry for entry in self._queue if entry[3] is not flight]

    def _pump(self, now: float) -> None:
        """Dispatches what finds room, from the head of the queue. Who does not fit is overtaken, but not for long."""
        i = 0
        while i < min(len(self._queue), LOOK_AHEAD):
            flight = self._queue[i][3]
            if self._place(flight, now):
                del self._queue[i]
            elif now - flight.request.arrival > self.limits.starving_s:
                return
            else:
                i += 1

    def _place(self, flight: Flight, now: float) -> bool:
        prefills = [w for w in self.pools.of_role("prefill") if self._prefill_has_room(w, flight)]
        decodes = [w for w in self.pools.of_role("decode") if self._decode_has_room(w, flight)]
        models = {w.hello.model for w in decodes}
        prefills = [w for w in prefills if w.hello.model in models]
        if not prefills:
            return False
        need = Need(flight.num_tokens, flight.hashes(prefills[0]), flight.request.session, self._next_dispatch)
        prefill = choose_prefill(self._policy, prefills, need)
        decode = choose_decode(self._policy, [w for w in decodes if prefill and w.hello.model == prefill.hello.model], need)
        if prefill is None or decode is None:
            return False
        self._dispatch(flight, prefill, decode, now)
        return True

    def _prefill_has_room(self, worker: Worker, flight: Flight) -> bool:
        if worker.load is not None and not worker.load.accepting and worker.dispatches:
            return False
        ahead = self.limits.queued_batches * worker.hello.max_batch_tokens
        waiting = worker.tokens_ahead_of(flight.num_tokens)
        return waiting == 0 or waiting + flight.num_tokens <= ahead

    def _decode_has_room(self, worker: Worker, flight: Flight) -> bool:
        if not worker.dispatches:
            return True  # what does not even fit into an idle worker is refused by it, with the reason
        rows = len(worker.dispatches) < worker.hello.max_num_seqs
        return rows and worker.blocks_available > worker.blocks_for(flight.num_tokens)

    def _dispatch(self, flight: Flight, prefill: Worker, decode: Worker, now: float) -> None:
        flight.epoch += 1
        flight.dispatch, self._next_dispatch = self._next_dispatch, self._next_dispatch + 1
        flight.prefill, flight.decode = prefill, decode
        flight.pending_blocks = decode.blocks_for(flight.num_tokens)
        prefill.pending[flight.dispatch] = flight.num_tokens
        decode.pending_blocks += flight.pending_blocks
        prefill.dispatches.add(flight.dispatch)
        decode.dispatches.add(flight.dispatch)
        self._by_dispatch[flight.dispatch] = flight
        flight.enter("prefill", now)
        peer = Peer(worker_id=decode.hello.worker_id, incarnation=decode.hello.incarnation, address=decode.hello.peer_address)
        self._actions.append(Send(prefill.id, Prefill(spec=flight.spec(self.incarnation, now), decode=peer)))

    def _serve_or_give_up(self, now: float) -> None:
        """Admitted requests wait a while for workers to come back, not for ever."""
        if not self.pools.gap:
            self._unserved_since = None
            return
        if self._unserved_since is None:
            self._unserved_since = now
        if now - self._unserved_since > self.limits.unserved_s:
            for _, _, _, flight in self._queue.copy():
                self._fail(flight, "unavailable", f"waited {self.limits.unserved_s:g} s: {self.pools.gap}", now)

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
