"""Decides which workers a waiting request goes to. Pure.

A request waits until a prefill worker and a decode worker that fit together have room for it.
"""

from __future__ import annotations

from itertools import chain
from math import inf

from .actions import Action
from .cache_index import Level
from .open_workers import OpenWorkers
from .overtaking import Blocked, Overtaking
from .pools import Pools
from .request import Request
from .request_queue import RequestQueue, Tried
from .routing import (
    Need,
    Policy,
    choose_borrower,
    choose_decode,
    choose_pair,
    choose_prefill,
    fitting,
    holding,
    prefix_source,
)
from .state_machine import RequestStateMachine
from .worker import WorkerRecord

Pair = tuple[WorkerRecord, WorkerRecord]
"""A prefill worker and a decode worker."""


class Placement:
    """Dispatches requests from the head of the queue."""

    def __init__(
        self,
        policy: Policy,
        queue: RequestQueue,
        pools: Pools,
        machine: RequestStateMachine,
        min_pull_tokens: int,
    ) -> None:
        """``min_pull_tokens``: see ``LifecycleLimits``."""
        self._min_pull_tokens = min_pull_tokens
        self._policy, self._queue, self._pools, self._machine = policy, queue, pools, machine
        self._assignments, self._suspicion = machine.assignments, machine.suspicion
        self._blocked: Blocked | None = None
        # Of the current pass:
        self._shortest_prompt: float = inf
        self._shortest_sequence: float = inf
        self._inconclusive = False  # something other than room may have kept a request waiting
        self._overtaking = Overtaking(pools)

    def place(self, request: Request, now: float) -> list[Action]:
        """Dispatch a new request, or add it to the queue."""
        if request.answer_id and (keeper := self._pools.keeping(request.answer_id)) is not None:
            return [self._machine.resume(request, keeper, now)]
        if len(self._queue):
            blocked = self._blocked
            still_blocked = (
                blocked is not None
                and blocked.keeps(request)
                and blocked.holds(self._queue, self._pools, self._overtaking)
            )
            self._queue.add(request)
            if not still_blocked:
                return self.place_waiting(now)
            assert blocked is not None
            self._blocked = blocked._replace(queue_version=self._queue.version)
            return []
        self._begin_pass()
        if actions := self._dispatch(request, now):
            self._queue.charge_unqueued(request)
            return actions
        self._queue.add(request)
        if not self._inconclusive:
            self._blocked = self._proof(None)
        return []

    def place_waiting(self, now: float) -> list[Action]:
        """Dispatch every waiting request that finds room."""
        queue, pools, blocked = self._queue, self._pools, self._blocked
        if not len(queue) or (blocked is not None and blocked.holds(queue, pools, self._overtaking)):
            return []
        if not (pools.open_of_role("decode").has_room(1) or pools.reserves_of_role("decode").has_room(1)):
            return []
        actions: list[Action] = []

        def place(request: Request) -> Tried:
            begun = self._dispatch(request, now)
            actions.extend(begun)
            if not begun and request.images and pools.without_images:
                return "aside"  # workers with room may take none
            return "placed" if begun else self._aside(request, now) if request.adapter else "waits"

        self._begin_pass()
        version = queue.version
        tried_all = queue.serve(place, now)
        placed_none = version == queue.version
        if not self._inconclusive and (tried_all or (placed_none and self._lacks_only_prefill_room())):
            self._blocked = self._proof(None if tried_all else queue.order_version)
        return actions

    def _begin_pass(self) -> None:
        self._blocked = None
        self._shortest_prompt = self._shortest_sequence = inf
        self._overtaking.begin_pass()
        self._inconclusive = self._queue.has_retries or bool(self._suspicion.suspects)

    def _proof(self, order_version: int | None) -> Blocked:
        shortest = self._shortest_prompt, self._shortest_sequence
        turned_away = self._overtaking.turned_away
        return Blocked(self._queue.version, self._pools.version, order_version, *shortest, turned_away)

    def _lacks_only_prefill_room(self) -> bool:
        """Whether only their prompts kept requests waiting: not another coordinator's, nor a worker that
        accepts nothing."""
        if self._shortest_sequence < inf or self._overtaking.turned_away:
            return False
        prefills = self._pools.open_of_role("prefill")
        return not any(w.num_others or (not w.accepting and w.dispatches) for w in prefills)

    def _aside(self, request: Request, now: float) -> Tried:
        """Return whether others may overtake a request that was not placed."""
        if self._overtaking.all_have(request.adapter):
            return "waits"
        if self._queue.is_starving(request, now):
            pools, usable = self._pools, self._overtaking.usable
            decodes = usable(pools.open_of_role("decode").with_room(request.num_tokens), request)
            prefills = usable(pools.open_of_role("prefill"), request)
            lacks_prefill = bool(decodes) and not any(self._prefill_has_room(w, request) for w in prefills)
            self._overtaking.keep_free(request, lacks_prefill)
        return "aside"

    # --- one request ---------------------------------------------------------------------------------

    def _dispatch(self, request: Request, now: float) -> list[Action]:
        """Begin an attempt. No actions: the request has to wait, for room or for the report of an answer."""
        if request.answer_id and not request.num_attempts:
            if (keeper := self._pools.keeping(request.answer_id)) is not None:
                return [self._machine.resume(request, keeper, now)]
            reported = all(w.num_cache_reports or w.draining for w in self._pools.of_role("decode"))
            if now < self._pools.all_here or not reported:
                self._inconclusive = True
                return []
        if (pair := self._choose_pair(request)) is None:
            return []
        turn, cache = self._assignments.next_dispatch, self._pools.cache
        source = prefix_source(request, pair[0], cache, turn, self._min_pull_tokens)
        return self._machine.dispatch(request, *pair, now, source)

    def _choose_pair(self, request: Request) -> Pair | None:
        """Return the workers for a request; None: none has room."""
        anywhere = self._overtaking.may_go_anywhere(request)
        is_first = not request.num_attempts and not self._suspicion.suspects
        if anywhere and is_first and self._pools.all_fit:
            if request.adapter and request.num_tokens >= min(self._shortest_prompt, self._shortest_sequence):
                return None  # in this pass
            return self._choose_among_all(request) or self._choose_borrower(request)
        if self._overtaking.cannot_be_placed(request):
            return None
        pair = self._choose_among_fitting(request, anywhere) or self._choose_borrower(request)
        if pair is None and not anywhere:
            self._overtaking.turn_away(request)
        return pair

    def _choose_among_all(self, request: Request) -> Pair | None:
        """For a first attempt, where every prefill worker fits every decode worker."""
        num_tokens, pools = request.num_tokens, self._pools
        prefills = self._candidates(pools.open_of_role("prefill"), request)
        if not prefills:
            self._shortest_prompt = min(self._shortest_prompt, num_tokens)
            return None
        decodes = self._candidates(pools.open_of_role("decode"), request)
        if not decodes:
            self._shortest_sequence = min(self._shortest_sequence, num_tokens)
            return None
        if len(pools.open_of_role("prefill")) == 1 == len(pools.open_of_role("decode")):
            return prefills[0], decodes[0]
        need = Need.of(request, prefills[0], self._assignments.next_dispatch)
        if self._policy == "hybrid" and need.first in pools.cache:
            levels = pools.cache.levels(need.hashes())
            prefills = self._with_holders(prefills, pools.open_of_role("prefill"), request, levels)
            decodes = self._with_holders(decodes, pools.open_of_role("decode"), request, levels)
        return choose_prefill(self._policy, prefills, need), choose_decode(self._policy, decodes, need)

    def _candidates(self, workers: OpenWorkers, request: Request) -> list[WorkerRecord]:
        """Return workers with room. The hybrid policy needs only those that may be the best if none has a
        prefix cached."""
        if self._policy != "hybrid":
            return workers.with_room(request.num_tokens)
        return self._best(workers, request, None)

    def _best(self, workers: OpenWorkers, request: Request, level: Level | None) -> list[WorkerRecord]:
        turn, session = self._assignments.next_dispatch, request.session
        return workers.best(request.num_tokens, turn, level=level, session=session)

    def _with_holders(
        self, candidates: list[WorkerRecord], workers: OpenWorkers, request: Request, levels: list[Level]
    ) -> list[WorkerRecord]:
        """Return the candidates, and of each level's holders those that may be the best."""
        holders = (worker for level in levels for worker in self._best(workers, request, level))
        return list(dict.fromkeys(chain(candidates, holders)))

    def _choose_among_fitting(self, request: Request, anywhere: bool) -> Pair | None:
        """For retries, suspects, and workers that differ."""
        num_tokens, pools, suspicion = request.num_tokens, self._pools, self._suspicion
        usable = self._overtaking.usable(pools.open_of_role("prefill"), request)
        prefills = [w for w in usable if self._prefill_has_room(w, request)]
        if not prefills:
            if anywhere:
                self._shortest_prompt = min(self._shortest_prompt, num_tokens)
            return None
        decodes = self._overtaking.usable(pools.open_of_role("decode").with_room(num_tokens), request)
        if not (decodes or anywhere):
            return None
        if (avoid := request.avoid) is not None:
            decodes = [w for w in decodes if w is not avoid and w.kind == avoid.kind] or decodes
        if suspicion.suspects:
            prefills, decodes = suspicion.allowed(request, prefills), suspicion.allowed(request, decodes)
        prefills = holding(request, prefills, pools.open_of_role("prefill"))
        decodes = holding(request, decodes, pools.open_of_role("decode"))
        if request.images:
            prefills, decodes = ([w for w in of if w.hello.takes_images] for of in (prefills, decodes))
        prefills, decodes = fitting(prefills, decodes)
        if not prefills or not decodes:
            self._inconclusive = True
            return None
        need = Need.of(request, prefills[0], self._assignments.next_dispatch)
        if pools.has_mixed:
            return choose_pair(self._policy, prefills, decodes, need)
        prefill = choose_prefill(self._policy, prefills, need)
        return prefill, choose_decode(self._policy, [w for w in decodes if w.kind == prefill.kind], need)

    def _choose_borrower(self, request: Request) -> Pair | None:
        """Return both workers of one process, one of them a reserve. None: there is none with room, or to
        wait costs less."""
        pools, suspicion, num_tokens = self._pools, self._suspicion, request.num_tokens
        for role in ("prefill", "decode"):  # keeps the bounds of their room close
            pools.reserves_of_role(role).has_room(num_tokens)
        pairs = [
            (prefill, decode)
            for prefill, decode in pools.borrowers()
            if (pools.lends_decode or not prefill.is_reserve)
            and self._prefill_has_room(prefill, request)
            and num_tokens <= decode.room
            and request.max_tokens <= decode.max_model_len
            and len(self._overtaking.usable((prefill, decode), request)) == 2
            and (prefill.hello.takes_images or not request.images)
        ]
        if suspicion.suspects:
            allowed = [suspicion.allowed(request, list(role)) for role in zip(*pairs, strict=True)]
            pairs = [
                pair for pair in pairs if all(w in of_role for w, of_role in zip(pair, allowed, strict=True))
            ]
        if not pairs:
            return None
        prefills = pools.open_of_role("prefill")
        ahead = prefills.sum_of_ranks + self._queue.num_tokens
        lacks_decode = prefills.has_room(num_tokens)
        has_to = lacks_decode or not len(prefills) or not self._overtaking.all_have(request.adapter)
        max_cost = inf if has_to else num_tokens + ahead / len(prefills)
        need = Need.of(request, pairs[0][0], self._assignments.next_dispatch)
        return choose_borrower(pairs, need, max_cost)

    def _prefill_has_room(self, worker: WorkerRecord, request: Request) -> bool:
        num_tokens = request.num_tokens
        if num_tokens >= worker.max_model_len:
            return False
        if not request.num_attempts or worker.is_reserve:
            return worker.room >= num_tokens
        if not worker.accepting and worker.dispatches:
            return False
        # retries are computed first (transport/messages/prompt_order.py)
        by_dispatch = self._assignments.by_dispatch
        ahead = sum(n for dispatch, n in worker.pending.items() if by_dispatch[dispatch].num_attempts > 1)
        return ahead == 0 or ahead + num_tokens <= worker.queue_budget
