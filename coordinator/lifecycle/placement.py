"""Decides which workers a waiting request goes to, and when another pass over the queue is worth while. Pure.

A request waits until a prefill worker and a decode worker that fit together have room for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from math import inf
from typing import NamedTuple

from ...transport.messages.messages import Role
from .actions import Action
from .cache_index import Level
from .open_workers import MAX_COMPARED, OpenWorkers
from .pools import Pools
from .request import Request
from .request_queue import RequestQueue, Tried
from .routing import (
    Need,
    Policy,
    PrefixSource,
    can_send_prefix,
    choose_borrower,
    choose_decode,
    choose_pair,
    choose_prefill,
    fitting,
    holding,
)
from .state_machine import RequestStateMachine
from .worker import WorkerRecord

Pair = tuple[WorkerRecord, WorkerRecord]
"""A prefill worker and a decode worker."""


class Blocked(NamedTuple):
    """Proof that another pass over the queue would place nothing.

    Holds until the queue or the workers change, or a worker has room for the shortest request that was turned
    away.
    """

    queue_version: int
    pools_version: int
    order_version: int | None  # None: holds whatever the order
    shortest_prompt: float  # tokens; no prefill worker had room for it
    shortest_sequence: float  # tokens; no decode worker had room for it

    def holds(self, queue: RequestQueue, pools: Pools) -> bool:
        """Whether nothing has changed since the pass that could help."""
        return (
            self.queue_version == queue.version
            and self.pools_version == pools.version
            and self.order_version in (None, queue.order_version)
            and pools.open_of_role("prefill").max_room < self.shortest_prompt
            and pools.open_of_role("decode").max_room < self.shortest_sequence
            and pools.reserves_of_role("prefill").max_room < self.shortest_prompt
            and pools.reserves_of_role("decode").max_room < self.shortest_sequence
        )


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
        self._turned_away: dict[str, float] = {}  # by adapter, tokens: no room for them
        self._kept_free: dict[Role, set[str]] = {"prefill": set(), "decode": set()}
        """Adapters of requests that have waited for too long: others leave them the workers with these."""

    def place(self, request: Request, now: float) -> list[Action]:
        """Dispatch a new request, or add it to the queue."""
        if request.answer_id and (keeper := self._pools.keeping(request.answer_id)) is not None:
            return [self._machine.resume(request, keeper, now)]
        if len(self._queue):
            blocked = self._blocked
            still_blocked = (
                blocked is not None
                and request.num_tokens >= min(blocked.shortest_prompt, blocked.shortest_sequence)
                and blocked.holds(self._queue, self._pools)
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
        queue = self._queue
        if not len(queue) or (self._blocked is not None and self._blocked.holds(queue, self._pools)):
            return []
        pools = self._pools
        if not (pools.open_of_role("decode").has_room(1) or pools.reserves_of_role("decode").has_room(1)):
            return []
        actions: list[Action] = []

        def place(request: Request) -> Tried:
            begun = self._dispatch(request, now)
            actions.extend(begun)
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
        self._turned_away.clear()
        for adapters in self._kept_free.values():
            adapters.clear()
        self._inconclusive = self._queue.has_retries or bool(self._suspicion.suspects)

    def _proof(self, order_version: int | None) -> Blocked:
        shortest = self._shortest_prompt, self._shortest_sequence
        return Blocked(self._queue.version, self._pools.version, order_version, *shortest)

    def _lacks_only_prefill_room(self) -> bool:
        """Whether only their prompts kept requests waiting: not another coordinator's, nor a worker that
        accepts nothing."""
        if self._shortest_sequence < inf:
            return False
        prefills = self._pools.open_of_role("prefill")
        return not any(w.num_others or (not w.accepting and w.dispatches) for w in prefills)

    def _aside(self, request: Request, now: float) -> Tried:
        """Return whether others may overtake a request that was not placed: where only some workers, or none,
        have its adapter. Once it has waited for too long they must leave these workers to it."""
        adapter, pools = request.adapter, self._pools
        if pools.all_have(adapter):
            return "waits"
        if pools.adapters.serves(adapter) and self._queue.is_starving(request, now):
            self._kept_free["decode"].add(adapter)
            prefills = self._usable(pools.open_of_role("prefill"), request)
            if not any(self._prefill_has_room(w, request) for w in prefills):
                self._kept_free["prefill"].add(adapter)
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
        return self._machine.dispatch(request, *pair, now, self._prefix_source(request, pair[0]))

    def _prefix_source(self, request: Request, prefill: WorkerRecord) -> PrefixSource | None:
        """Return a worker that has enough more of the prompt cached than the one that computes it."""
        least, size = self._min_pull_tokens, prefill.block_size
        if not least or request.num_tokens <= least or prefill.window or request.needs_prompt_logprobs:
            return None
        if request.first_hash(prefill) not in self._pools.cache:
            return None
        hashes = request.hashes(prefill)[: (request.num_tokens - 1) // size]  # the last token is computed
        for block_hash, holders in self._pools.cache.levels(hashes):
            if block_hash in prefill.cached:
                return None
            turn = self._assignments.next_dispatch % len(holders)
            in_turn = (holders[turn : turn + MAX_COMPARED] + holders)[:MAX_COMPARED]
            if (source := next((w for w in in_turn if can_send_prefix(w, prefill)), None)) is not None:
                num_blocks = source.match_prefix(hashes)
                enough = (num_blocks - prefill.match_prefix(hashes)) * size >= least
                return PrefixSource(source, hashes[:num_blocks]) if enough else None
        return None

    def _choose_pair(self, request: Request) -> Pair | None:
        """Return the workers for a request; None: none has room."""
        adapter, pools = request.adapter, self._pools
        everyone = not self._kept_free["decode"] and (not adapter or pools.all_have(adapter))
        if everyone and pools.all_fit and not request.num_attempts and not self._suspicion.suspects:
            if adapter and request.num_tokens >= min(self._shortest_prompt, self._shortest_sequence):
                return None  # in this pass
            return self._choose_among_all(request) or self._choose_borrower(request)
        if adapter and not pools.adapters.serves(adapter):
            return None
        too_long = self._turned_away.get(adapter, inf)
        if not request.num_attempts and request.num_tokens >= too_long:
            return None
        pair = self._choose_among_fitting(request) or self._choose_borrower(request)
        if pair is None and not everyone:
            self._inconclusive = True
            self._turned_away[adapter] = min(request.num_tokens, too_long)
        return pair

    def _usable(self, workers: Iterable[WorkerRecord], request: Request) -> list[WorkerRecord]:
        """Return the workers that have the request's adapter and are not left to other requests."""
        kept_free, adapter = self._kept_free, request.adapter
        return [w for w in workers if w.has(adapter) and kept_free[w.role].isdisjoint(w.contents)]

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

    def _choose_among_fitting(self, request: Request) -> Pair | None:
        """For retries, suspects, and workers that differ."""
        num_tokens, pools, suspicion = request.num_tokens, self._pools, self._suspicion
        prefills = [w for w in pools.open_of_role("prefill") if self._prefill_has_room(w, request)]
        if not prefills:
            self._shortest_prompt = min(self._shortest_prompt, num_tokens)
            return None
        decodes = pools.open_of_role("decode").with_room(num_tokens)
        if request.adapter or self._kept_free["decode"]:
            prefills, decodes = self._usable(prefills, request), self._usable(decodes, request)
        if (avoid := request.avoid) is not None:
            decodes = [w for w in decodes if w is not avoid and w.kind == avoid.kind] or decodes
        if suspicion.suspects:
            prefills, decodes = suspicion.allowed(request, prefills), suspicion.allowed(request, decodes)
        prefills = holding(request, prefills, pools.open_of_role("prefill"))
        decodes = holding(request, decodes, pools.open_of_role("decode"))
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
            and len(self._usable((prefill, decode), request)) == 2
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
        some_lack_it = bool(request.adapter) and not pools.all_have(request.adapter)
        has_to = lacks_decode or some_lack_it or not len(prefills)
        max_cost = inf if has_to else num_tokens + ahead / len(prefills)
        return choose_borrower(
            pairs, Need.of(request, pairs[0][0], self._assignments.next_dispatch), max_cost
        )

    def _prefill_has_room(self, worker: WorkerRecord, request: Request) -> bool:
        num_tokens = request.num_tokens
        if num_tokens >= worker.max_model_len:
            return False
        if not request.num_attempts or worker.is_reserve:
            return worker.room >= num_tokens
        if not worker.accepting and worker.dispatches:
            return False
        # retries are computed first (transport/messages/prompt_order.py)
        ahead = self._pending_retry_tokens(worker)
        return ahead == 0 or ahead + num_tokens <= worker.queue_budget

    def _pending_retry_tokens(self, worker: WorkerRecord) -> int:
        """Return the tokens of retried prompts that this prefill worker has not computed yet."""
        by_dispatch = self._assignments.by_dispatch
        return sum(
            tokens for dispatch, tokens in worker.pending.items() if by_dispatch[dispatch].num_attempts > 1
        )
