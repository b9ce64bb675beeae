"""Every request's life, from submission to its one terminal event, whatever dies on the way. Pure.

    queue --place--> prefill --FirstToken--> handoff --Joined--> decode --last token--> end
      ^                 |                       |                  |
      +---- a new epoch: prompt plus the tokens the client has ----+

A request is dispatched late: it waits here until a prefill worker and a decode worker have room. Each attempt is a new epoch under a new
dispatch number, so that whatever an older attempt still says names a dispatch that is unknown, and is dropped. Output tokens carry
their index: each index reaches the client once, in order. Coordinator and workers compare notes with every heartbeat: a dispatch that
no worker holds is lost and tried again; one that a worker holds and nobody wants is cancelled.

    placement.py    which worker gets which waiting request
    progress.py     what workers say of a request: its milestones and its tokens
    attempts.py     how an attempt ends: done, tried again, given up
    membership.py   workers come, report, drain and go
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from ...transport.handoff.actions import TellTokens
from ...transport.handoff.handoff import Wait
from ...transport.messages.messages import BlockEvents, FirstToken, Goodbye, Hello, Joined, Load, Message, RequestFailed, Role, StepTokens
from .actions import Action, End
from .attempts import Attempts
from .flips import FlipRecord
from .limits import LifecycleLimits as LifecycleLimits
from .limits import shortest_timeout
from .membership import Membership
from .outcomes import Recovery
from .placement import Placement
from .pools import Pools
from .progress import Progress
from .request import Ended, Request
from .routing import Policy
from .state import LATE_TICK_S, LifecycleState
from .worker import Worker, WorkerId

CHARGE_EVERY_S = 0.25


class Lifecycle:
    """The coordinator's decisions. Feed it messages, submissions and ``tick``; carry out what each call returns."""

    def __init__(self, incarnation: int, policy: Policy, limits: LifecycleLimits | None = None) -> None:
        self.incarnation = incarnation
        self.limits = limits or LifecycleLimits()
        self._state = LifecycleState(incarnation, self.limits)
        self._attempts = Attempts(self._state)
        self._members = Membership(self._state, self._attempts, policy)
        self._progress = Progress(self._state, self._attempts, self._members)
        self._placement = Placement(self._state, policy)
        self._unserved_since: float | None = None
        self._ticked: float | None = None
        self._caught_up_at = 0.0
        self._charged = float("-inf")
        self._patience = shortest_timeout(self.limits)
        self._look_at = float("inf")  # the first deadline of any request; or earlier
        self.num_refused_early = 0

    # --- for people ------------------------------------------------------------------------------

    @property
    def pools(self) -> Pools:
        return self._state.pools

    @property
    def proven(self) -> bool:
        """A request has gone prefill, handoff, decode."""
        return self._attempts.outcomes.proven

    @property
    def failing(self) -> str:
        """In which stage the last requests all failed, and why; empty where they did not."""
        return str(self._attempts.outcomes.failing)

    @property
    def num_queued(self) -> int:
        return len(self._state.line)

    @property
    def num_requests(self) -> int:
        return len(self._state.table.requests)

    @property
    def watches_tokens(self) -> bool:
        """Whether something hangs on the tokens of running requests as they come: somebody is under suspicion until it makes progress."""
        return len(self._state.suspicion) > 0

    @property
    def last_retries(self) -> deque[str]:
        """Which requests had to be dispatched again, and why."""
        return self._attempts.outcomes.last_retries

    @property
    def last_recoveries(self) -> deque[Recovery]:
        """How long requests stood still that had to be dispatched again."""
        return self._attempts.outcomes.last_recoveries

    @property
    def reasons_lost(self) -> dict[WorkerId, str]:
        """Why the latest of the workers that are gone are gone."""
        return self._members.reasons_lost

    def counters(self) -> dict[str, float]:
        """Cumulative since the start."""
        members = self._members
        return {
            "redispatches": self._attempts.outcomes.num_retries,
            "refused_early": self.num_refused_early,
            "recoveries": self._attempts.outcomes.num_recoveries,
            "recovery_seconds": self._attempts.outcomes.recovery_s,
            "workers_lost": members.num_workers_lost,
            "workers_left": members.num_workers_left,
            "sequences_moved": members.evacuation.num_moved,
            "flips": members.flips.count,
            "moves_given_up": members.evacuation.num_given_up,
            **{f"deadlines_{stage}": count for stage, count in self._attempts.outcomes.num_deadlines.items()},
        }

    def num_by_stage(self) -> dict[str, int]:
        return self._state.table.num_by_stage()

    def waits(self) -> Iterator[Wait]:
        """Every request here."""
        for request_id, request in self._state.table.requests.items():
            yield Wait(request_id, request.state, request.deadline)

    def request_ids(self, dispatches: Iterable[int]) -> list[str]:
        """The requests behind these dispatches."""
        return self._state.table.request_ids(dispatches)

    # --- from the HTTP side ----------------------------------------------------------------------

    def refusal(self, now: float) -> str:
        """Why new requests are turned away, as a sentence; empty where they are taken. While workers that left in good order are
        expected back, requests wait."""
        return self.pools.gap if now >= self._members.expected_until else ""

    def drain(self, worker_id: str, timeout_s: float | None) -> tuple[Worker | None, list[Action]]:
        """A person wants this worker to leave: it gets no new work from now on. None: no such worker is here."""
        worker = self._members.drain(worker_id, timeout_s)
        return worker, self._state.take()

    def flip(self, name: str, role: Role, timeout_s: float | None, now: float) -> tuple[FlipRecord | str | None, list[Action]]:
        """A worker is to change its role in place. A sentence where it cannot; None: no such worker is here."""
        ordered = self._members.flips.order(name, role, timeout_s, now)
        return ordered, self._state.take()

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return list(self._state.table.requests.values())

    @property
    def flips_under_way(self) -> Mapping[str, FlipRecord]:
        """By process."""
        return self._members.flips.under_way

    @property
    def flips(self) -> deque[FlipRecord]:
        """The latest changes of roles."""
        return self._members.flips.latest

    def submit(self, request: Request, now: float) -> list[Action]:
        """Takes a request in, or ends it at once."""
        if (refused := self._refused(request, now)) is not None:
            return [End(request, refused)]
        request.admit(now)
        self._state.table.requests[request.request_id] = request
        self._look_at = min(self._look_at, self._worth_a_look(request))
        self._placement.take_in(request, now)
        return self._state.take()

    def _refused(self, request: Request, now: float) -> Ended | None:
        if refusal := self.refusal(now):
            return Ended(error="unavailable", message=refusal, retry_after_s=1.0)
        if self.num_queued >= self.limits.max_queue:
            return Ended(error="overloaded", message=f"{self.num_queued} requests are waiting already", retry_after_s=1.0)
        num_tokens, longest = len(request.prompt_token_ids), self.pools.max_sequence_tokens
        if num_tokens > longest - 1 and request.sampling.max_tokens > 0:
            message = f"the prompt has {num_tokens} tokens; the workers have room for {longest - 1} and one answer token"
            return Ended(error="refused", message=message)
        return self._too_late(request, now)

    def _too_late(self, request: Request, now: float) -> Ended | None:
        """Refuses what would break its deadline, or its class's objective, by the forecast: at once, and not after the wait."""
        if not self._state.forecast.known:
            return None
        prefills = self.pools.open_of_role("prefill")
        ahead = prefills.sum_of_ranks  # tokens on the workers
        if not (self.num_queued or ahead):
            return None
        ahead += self._state.line.tokens_ahead(request.priority_class, request.tenant)
        wait_s = self._state.forecast.seconds(prefills, ahead, len(request.prompt_token_ids))
        allowed_s = min(request.deadline - now, self.limits.ttft_slo_s.get(request.priority_class, float("inf")))
        if wait_s is None or wait_s <= allowed_s:
            return None
        self.num_refused_early += 1
        message = (
            f"the first token would take about {wait_s:.1f} s, and {allowed_s:g} s are allowed ({request.priority_class}); "
            "try again later, allow more time, or add prefill workers"
        )
        return Ended(error="overloaded", message=message, retry_after_s=wait_s - allowed_s)

    def _charge(self, now: float) -> None:
        """Tenants pay for what their running requests generate, while they do."""
        if now - self._charged >= CHARGE_EVERY_S:
            self._charged = now
            self._state.line.charge_running(self._state.table.requests.values())

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """The client has gone, or has enough."""
        request = self._state.table.requests.get(request_id)
        if request is not None:
            self._attempts.detach(request, now)
            self._attempts.end(request, Ended(), now)
            self._placement.serve_line(now)
        return self._state.take()

    # --- from the workers ------------------------------------------------------------------------

    def receive(self, worker_id: WorkerId, message: Message, now: float) -> list[Action]:
        """Any message of a worker. One that is not known (dead to us, or of a time before our restart) is fenced."""
        worker = self.pools.workers.get(worker_id)
        if isinstance(message, Hello):
            self._members.hello(worker_id, message, now)
            self._placement.serve_line(now)
        elif worker is None:
            self._members.fence(worker_id, now)
        elif isinstance(message, BlockEvents):
            self.pools.book(message)
        elif self._hear(worker, message, now):
            self._placement.serve_line(now)
        return self._state.take()

    def _hear(self, worker: Worker, message: Message, now: float) -> bool:
        """Whether room may have become free."""
        if isinstance(message, StepTokens):
            return self._progress.step_tokens(worker, message, now)
        if isinstance(message, Load):
            self._members.load(worker, message, now)
        elif isinstance(message, Goodbye):
            self._members.goodbye(worker, now)
        elif isinstance(message, FirstToken | Joined | RequestFailed) and message.coordinator == self.incarnation:
            self._progress.milestone(worker, message, now)
        else:
            return False
        return True

    def receive_tokens(self, worker_id: WorkerId, told: TellTokens, now: float) -> list[Action]:
        """What stands for many StepTokens of a decode worker in virtual time."""
        worker = self.pools.workers.get(worker_id)
        if worker is not None and self._progress.token_runs(worker, told, now):
            self._placement.serve_line(now)
        return self._state.take()

    def worker_ending(self, worker_id: WorkerId) -> None:
        """Its process is known to have ended; what it said before may still come, and until ``worker_ended`` its silence says nothing."""
        if (worker := self.pools.workers.get(worker_id)) is not None:
            worker.ended = True

    def worker_ended(self, worker_id: WorkerId, now: float) -> list[Action]:
        """Its process is known to have ended, and all that it said has been heard."""
        worker = self.pools.workers.get(worker_id)
        if worker is not None:
            self._members.ended(worker, now)
            self._placement.serve_line(now)
        return self._state.take()

    def reached(self, worker_id: WorkerId, connected: bool, now: float) -> None:
        """Something was sent to this worker, over a connection that is there, or not."""
        worker = self.pools.workers.get(worker_id)
        if worker is not None:
            worker.unreached_since = None if connected else worker.unreached_since if worker.unreached_since is not None else now

    def connection_lost(self) -> None:
        """The connection of one of the workers has ended (or a stranger's): the next ticks find out whose."""
        self._members.connection_lost()

    # --- as time goes by -------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """At least ten times a second, once what has arrived was received: dead workers, deadlines, lost dispatches, the queue."""
        self._note_own_stall(now)
        self._members.look(now)
        self._serve_or_give_up(now)
        self._state.suspicion.credit_all()
        if now >= self._look_at:
            self._expire(now)
        for request in self._lost(now):
            self._attempts.retry(request, "the workers hold nothing of it", now)
        self._charge(now)
        self._members.evacuate(now)
        self._placement.serve_line(now)
        return self._state.take()

    def _expire(self, now: float) -> None:
        """Ends what has passed a deadline, and finds out when it is worth while to look again."""
        for request in list(self._state.table.requests.values()):
            self._attempts.expire_if_late(request, now)
        self._look_at = min((self._worth_a_look(request) for request in self._state.table.requests.values()), default=float("inf"))

    def _worth_a_look(self, request: Request) -> float:
        """Before this time it passes no deadline: stages begin and tokens come later than the last ones."""
        patient_until = (min(request.entered, request.token_at) if request.tokens else request.entered) + self._patience
        return min(request.deadline, patient_until)

    def _lost(self, now: float) -> list[Request]:
        """Those that no worker holds. Each is assigned to a decode worker, which has not reported it."""
        by_dispatch = self._state.table.by_dispatch
        unheard = (d for worker in self.pools.of_role("decode") for d in worker.dispatches - worker.held)
        requests = dict.fromkeys(by_dispatch[dispatch] for dispatch in sorted(unheard))  # one that moves has two dispatches
        return [request for request in requests if request.dispatch >= 0 and self._is_lost(request, now)]

    def _note_own_stall(self, now: float) -> None:
        """After a stall no worker was silent. What was sent meanwhile arrives within as long again: ZeroMQ's thread stood still too."""
        stall = now - self._ticked if self._ticked is not None else 0.0
        if stall > max(self.limits.heartbeat_s, LATE_TICK_S):
            self.pools.forgive(stall)
            self._state.resumed_at, self._caught_up_at = now, now + stall
        if now >= self._caught_up_at:
            self._state.heard_all_at = now
        self._ticked = now

    def _is_lost(self, request: Request, now: float) -> bool:
        """Every worker that should hold this dispatch has reported since it had time to take it, and not named it. One that is silent has
        said nothing of it: whether that one is dead is another question, and no failure of the request's."""
        if now - request.entered < self.limits.lost_after_s:
            return False
        if request.move is not None and not self._members.evacuation.is_lost(request, now):
            return False  # who handed it over may be heard before who took it
        holders = {"prefill": [request.prefill], "handoff": [request.prefill, request.decode], "decode": [request.decode]}[request.state]
        told_by = request.entered + self.limits.lost_after_s
        return all(w is None or (w.held_at >= told_by and request.dispatch not in w.held) for w in holders)

    def _serve_or_give_up(self, now: float) -> None:
        """Admitted requests wait a while for workers to come back, not for ever."""
        if not self.pools.gap:
            self._unserved_since = None
            return
        if self._unserved_since is None:
            self._unserved_since = now
        if now - self._unserved_since > self.limits.unserved_s:
            for request in self._state.line:
                self._attempts.fail(request, "unavailable", f"waited {self.limits.unserved_s:g} s: {self.pools.gap}", now)
