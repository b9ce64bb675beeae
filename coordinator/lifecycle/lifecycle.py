"""The coordinator's decisions about every request and every worker, as one pure core.

Events go in: submissions and cancellations of the HTTP side, messages of workers, ticks. Each call returns
the actions that its shell carries out, in order. Requests are dispatched late: they wait here until a pair of
workers has room.

    every request                                     rare or idle
    state_machine.py  states, transitions, deadlines  limits.py      limits; deadlines that have passed
    request.py        one request                     forecast.py    the time to a first token
    request_queue.py  the order of waiting requests   membership.py  workers come, report, and go
    placement.py      when one is dispatched          evacuation.py  sequences leave draining workers
    routing.py        to which of several workers     flips.py       workers change their role
    progress.py       workers' messages about it      suspicion.py   requests that kill workers
    pools.py          the workers, by role            snapshot.py    the present state, as values
    worker.py         one worker                      assignments.py the requests of each worker
    open_workers.py   the workers with room           cache_index.py the workers that have a block
    overtaking.py     requests for adapters wait      adapters.py    names of adapters
    time_ledger.py    where a request's time goes     worker_fit.py  which workers fit together
    outcomes.py       counts, readiness               actions.py     the actions for the shell
"""

from __future__ import annotations

from ...transport.messages.messages import (
    BlockEvents,
    FirstToken,
    Goodbye,
    Hello,
    Joined,
    Load,
    Message,
    OtherVersion,
    RequestFailed,
    Role,
    StepTokens,
)
from . import adapters
from .actions import Action, End
from .evacuation import Evacuation
from .flips import FlipRecord, Flips
from .forecast import Forecast
from .limits import LifecycleLimits as LifecycleLimits
from .membership import Membership
from .placement import Placement
from .pools import Pools
from .progress import Progress
from .request import Ended, Request
from .request_queue import RequestQueue
from .routing import Policy
from .state_machine import RequestStateMachine
from .worker import WorkerId, WorkerRecord

CHARGE_EVERY_S = 0.25


class _Admission:
    """Refuses requests that cannot be served, or not in time, when they arrive."""

    def __init__(
        self, limits: LifecycleLimits, pools: Pools, queue: RequestQueue, forecast: Forecast
    ) -> None:
        self._limits, self._pools, self._queue, self._forecast = limits, pools, queue, forecast
        self.num_refused_early = 0

    def refuse(self, request: Request, now: float) -> Ended | None:
        """Return the terminal event of a request that is not admitted; None: it is."""
        if full := self._queue.full(self._limits.max_queue):
            return Ended(error="overloaded", message=full, retry_after_s=1.0)
        num_tokens, longest = len(request.prompt_token_ids), self._pools.max_sequence_tokens
        if num_tokens > longest - 1 and request.sampling.max_tokens > 0:
            room = f"the workers have room for {longest - 1} and one answer token"
            return Ended(error="refused", message=f"the prompt has {num_tokens} tokens; {room}")
        if request.images and (names := self._pools.without_images):
            message = f"worker {names[0]} takes no images: it is older, or its log has the reason"
            return Ended(error="unavailable", message=message, retry_after_s=1.0)
        return self._refuse_late(request, now)

    def _refuse_late(self, request: Request, now: float) -> Ended | None:
        """Refuse at once, not after the wait, a request that would miss its deadline or its objective."""
        prefills = self._pools.open_of_role("prefill")
        ahead = prefills.sum_of_ranks  # tokens on the workers
        if not (len(self._queue) or ahead) or not self._forecast.known:
            return None
        ahead += self._queue.tokens_ahead(request.priority_class, request.tenant)
        wait_s = self._forecast.seconds(prefills, ahead, len(request.prompt_token_ids))
        slo_s = self._limits.ttft_slo_s.get(request.priority_class, float("inf"))
        allowed_s = max(0.0, min(request.deadline - now, slo_s))
        if wait_s is None or wait_s <= allowed_s:
            return None
        self.num_refused_early += 1
        message = (
            f"the first token would take about {wait_s:.1f} s, and {allowed_s:g} s are allowed "
            f"({request.priority_class}); try again later, allow more time, or add prefill workers"
        )
        return Ended(error="overloaded", message=message, retry_after_s=wait_s - allowed_s)


class Lifecycle:
    """One coordinator. ``now`` is in seconds of a monotonic clock."""

    def __init__(self, incarnation: int, policy: Policy, limits: LifecycleLimits | None = None) -> None:
        self.incarnation = incarnation
        self.limits = limits = limits or LifecycleLimits()
        self.pools = Pools(limits)
        self.queue = RequestQueue(limits.starving_s)
        self.flips = Flips(incarnation, self.pools)
        self._machine = RequestStateMachine(incarnation, limits, self.pools, self.queue)
        self.requests = self._machine.assignments.requests  # all that have not ended, by id
        self.outcomes = self._machine.outcomes
        forecast = Forecast()
        self._admission = _Admission(limits, self.pools, self.queue, forecast)
        self._placement = Placement(policy, self.queue, self.pools, self._machine, limits.min_pull_tokens)
        self._progress = Progress(self._machine)
        self._members = Membership(incarnation, limits, self.pools, self._machine, self.flips, forecast)
        self._evacuation = Evacuation(incarnation, limits, policy, self.pools, self._machine)
        self._unserved_since: dict[str, float] = {}
        """By adapter that requests wait for and no fitting pair has; under "" while there is no pair."""
        self._charged_at = float("-inf")

    # --- the HTTP side -------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> list[Action]:
        """Admit a request, or end it at once."""
        if gap := self.gap(now):
            return [End(request, Ended(error="unavailable", message=gap, retry_after_s=1.0))]
        if not self._is_served(request) and now >= self._members.expected_until:
            gone = adapters.sentence(request.adapter_name)
            return [End(request, Ended(error="unavailable", message=gone, retry_after_s=1.0))]
        if (refused := self._admission.refuse(request, now)) is not None:
            return [End(request, refused)]
        self._machine.admit(request, now)
        return self._placement.place(request, now)

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """End a request whose client has gone, or has enough. An unknown id is ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        return self._machine.cancel(request, now) + self._placement.place_waiting(now)

    def gap(self, now: float) -> str:
        """Return why new requests are refused, as a sentence; empty if they are accepted.

        While workers that left in good order are expected back, requests are accepted and wait.
        """
        if not self.pools.gap or now < self._members.expected_until:
            return ""
        refused = [f"worker {name} is refused: {reason}" for name, reason in self.refused(now).items()]
        return "; ".join([self.pools.gap, *refused[:1]])

    def _is_served(self, request: Request) -> bool:
        return not request.adapter or self.pools.adapters.serves(request.adapter)

    def refused(self, now: float) -> dict[str, str]:
        """Return the workers that are refused for their wire version or model, each with a sentence."""
        return self._members.refused(now)

    # --- operators -----------------------------------------------------------------------------------

    def drain(self, name: str, timeout_s: float | None) -> tuple[list[WorkerRecord], list[Action]]:
        """Have a worker, or every role of a process, leave: they get no new work from now on. Return them."""
        return self._members.drain(name, timeout_s)

    def flip(
        self, name: str, role: Role, timeout_s: float | None, now: float
    ) -> tuple[FlipRecord | str | None, list[Action]]:
        """Have a worker change its role. Return a sentence where it cannot, or None if there is no such
        worker."""
        return self.flips.order(name, role, timeout_s, now)

    def request_ids(self, worker: WorkerRecord) -> list[str]:
        """Return the ids of the requests that are assigned to a worker."""
        return sorted(request.request_id for request in self._machine.assignments.of(worker))

    def counters(self) -> dict[str, float]:
        """Return counters for metrics, cumulative since the start."""
        members, outcomes = self._members, self.outcomes
        return {
            "redispatches": outcomes.num_retries,
            "refused_early": self._admission.num_refused_early,
            "recoveries": outcomes.num_recoveries,
            "recovery_seconds": outcomes.recovery_s,
            "workers_lost": members.num_lost,
            "workers_left": members.num_left,
            "sequences_moved": outcomes.num_moved,
            "flips": self.flips.count,
            "moves_given_up": outcomes.num_moves_given_up,
            "answers_resumed": outcomes.num_resumed,
            "prefix_pulls": outcomes.num_pulls,
            "borrowed_prompts": outcomes.num_borrowed_prompts,
            "borrowed_sequences": outcomes.num_borrowed_sequences,
            **{f"deadlines_{stage}": count for stage, count in outcomes.num_deadlines.items()},
        }

    # --- the workers ---------------------------------------------------------------------------------

    def receive(self, worker_id: WorkerId, message: Message, now: float) -> list[Action]:
        """Take any message of a worker. An unknown worker (declared dead, or older than this coordinator)
        is fenced."""
        if isinstance(message, Hello):
            actions = self._members.hello(worker_id, message, now)
        elif isinstance(message, OtherVersion):
            return self._members.refuse(worker_id, message, now)
        elif (worker := self.pools.workers.get(worker_id)) is None:
            return self._members.fence(worker_id, now)
        elif isinstance(message, StepTokens):
            return self._receive_tokens(worker, message, now)
        elif isinstance(message, BlockEvents):
            self.pools.update_cache(message)
            return []
        elif isinstance(message, Load):
            actions = self._members.load(worker, message, now)
            if worker.draining:
                actions += self._evacuation.evacuate(now)
        elif isinstance(message, Goodbye):
            actions = self._members.goodbye(worker, now)
        elif (
            isinstance(message, FirstToken | Joined | RequestFailed)
            and message.coordinator == self.incarnation
        ):
            actions = self._receive_milestone(worker, message, now)
        else:
            return []
        return actions + self._placement.place_waiting(now)

    def _receive_tokens(self, worker: WorkerRecord, message: StepTokens, now: float) -> list[Action]:
        if message.coordinator != self.incarnation:
            return []
        version = self._machine.assignments.version
        actions = self._progress.step_tokens(worker, message, now)
        if version == self._machine.assignments.version:
            return actions
        return actions + self._placement.place_waiting(now)

    def _receive_milestone(
        self, worker: WorkerRecord, message: FirstToken | Joined | RequestFailed, now: float
    ) -> list[Action]:
        if self.flips.awaited and not isinstance(message, RequestFailed):
            self.flips.worked(worker, now)
        num_moved = self.outcomes.num_moved
        actions = self._progress.milestone(worker, message, now)
        return actions if num_moved == self.outcomes.num_moved else actions + self._evacuation.evacuate(now)

    def process_ending(self, worker_id: WorkerId) -> None:
        """Note that a worker's process has ended. Its last messages are still to be read."""
        if (worker := self.pools.workers.get(worker_id)) is not None:
            self.pools.process_ending(worker)

    def process_ended(self, worker_id: WorkerId, now: float) -> list[Action]:
        """Remove a worker whose process has ended, once all its messages were read."""
        worker = self.pools.workers.get(worker_id)
        if worker is None:
            return []
        return self._members.process_ended(worker, now) + self._placement.place_waiting(now)

    def connection_lost(self) -> None:
        """Note that some connection has ended; the next ticks find out which worker's."""
        self._members.connection_lost()

    # --- time ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Check on dead workers, deadlines, lost dispatches and the queue. Call it at least ten times a
        second, after all messages that have arrived were received."""
        if stall_s := self._machine.stalls.tick(now):
            self.pools.forgive(stall_s)
        actions = self._members.check(now)
        actions += self._give_up_unserved(now)
        self._machine.suspicion.credit_all()
        actions += self._machine.end_late(now)
        actions += self._machine.retry_lost(now)
        if now - self._charged_at >= CHARGE_EVERY_S:
            self._charged_at = now
            self.queue.charge_running(self.requests.values())
        actions += self._evacuation.evacuate(now)
        actions += self._placement.place_waiting(now)
        return actions

    def _give_up_unserved(self, now: float) -> list[Action]:
        """End the waiting requests when a role, or no fitting pair with their adapter, has been there for too
        long; at once those whose adapter no worker has any more."""
        waiting = [r for r in self.queue if r.adapter and not self._is_served(r)]
        missing = {request.adapter for request in waiting} | ({""} if self.pools.gap else set())
        since = self._unserved_since = {each: self._unserved_since.get(each, now) for each in missing}
        unserved_s, actions = self.limits.unserved_s, list[Action]()
        late, fail = f"waited {unserved_s:g} s: ", self._machine.fail
        for request in waiting:
            gone = adapters.sentence(request.adapter_name)
            if not self.pools.adapters.may_return(request.adapter):
                actions += fail(request, "unavailable", f"{gone}; send the request again", now)
            elif now - since[request.adapter] > unserved_s:
                actions += fail(request, "unavailable", late + gone, now)
        if "" in since and now - since[""] > unserved_s:
            for request in self.queue:
                actions += fail(request, "unavailable", late + self.pools.gap, now)
        return actions
