"""Which worker gets which waiting request. Pure.

A request waits until a prefill worker and a decode worker that fit together have room for it.
"""

from __future__ import annotations

from math import inf

from ...transport.messages.messages import Prefill
from .actions import Send
from .open_workers import MOST_COMPARED, OpenWorkers
from .request import Request
from .routing import Need, Policy, choose_decode, choose_pair, choose_prefill, that_fit, that_hold
from .state import LifecycleState
from .time_ledger import AttemptTimes
from .worker import Worker

Pair = tuple[Worker, Worker]
"""Where a prompt is computed, and where its sequence runs."""


class Placement:
    """Dispatches from the head of the waiting line."""

    def __init__(self, state: LifecycleState, policy: Policy) -> None:
        self._state, self._policy = state, policy
        self._failed: tuple[int, int] | None = None
        """Who waited and who was here after the last pass over the line, if one more would place nobody ..."""
        self._order: int | None = None  # ... in the same order, as the line counts them; None: in whatever order ...
        self._shortest_prompt = self._shortest_sequence = inf
        """... until there is room for one as short as those that found none: at a prefill worker, or else at a decode worker."""
        self._unsure = False  # whether anything but that kept a request waiting

    def take_in(self, request: Request, now: float) -> None:
        """A new request is dispatched, or else waits."""
        line = self._state.line
        if len(line):
            hopeless = request.num_tokens >= min(self._shortest_prompt, self._shortest_sequence) and self._is_hopeless()
            line.join(request)
            if hopeless:
                self._remember_failure()
            else:
                self.serve_line(now)
            return
        self._begin_pass()
        if self._place(request, now):
            line.pass_by(request)
        else:
            line.join(request)
            if not self._unsure:
                self._remember_failure()

    def serve_line(self, now: float) -> None:
        """Dispatches what finds room."""
        line = self._state.line
        if not len(line) or self._is_hopeless() or not self._state.pools.open_of_role("decode").has_room(1):
            return
        self._begin_pass()
        num_changes = line.num_changes
        tried_all = line.serve(lambda request: self._place(request, now), now)
        if not self._unsure and (tried_all or (num_changes == line.num_changes and self._lacks_only_prefills())):
            self._order = None if tried_all else line.num_orders
            self._remember_failure()

    def _begin_pass(self) -> None:
        self._failed = self._order = None
        self._shortest_prompt = self._shortest_sequence = inf
        self._unsure = self._state.line.anybody_returns or len(self._state.suspicion) > 0

    def _remember_failure(self) -> None:
        self._failed = (self._state.line.num_changes, self._state.pools.num_changes)

    def _is_hopeless(self) -> bool:
        """Nothing has changed since the last pass that could help."""
        line, pools = self._state.line, self._state.pools
        return (
            self._failed == (line.num_changes, pools.num_changes)
            and self._order in (None, line.num_orders)
            and pools.open_of_role("prefill").most_room < self._shortest_prompt
            and pools.open_of_role("decode").most_room < self._shortest_sequence
        )

    def _lacks_only_prefills(self) -> bool:
        """No other coordinator and no worker that takes nothing had a part in it."""
        strange = any(w.num_others or (not w.accepting and w.dispatches) for w in self._state.pools.open_of_role("prefill"))
        return self._shortest_sequence == inf and not strange

    def _place(self, request: Request, now: float) -> bool:
        ordinary = self._state.pools.all_fit and not request.num_attempts and not len(self._state.suspicion)
        pair = self._best_pair(request) if ordinary else self._fitting_pair(request)
        if pair is None:
            return False
        self._dispatch(request, *pair, now)
        return True

    def _best_pair(self, request: Request) -> Pair | None:
        """Where every prefill worker may go with every decode worker, for a request that has not been dispatched before."""
        num_tokens, pools = request.num_tokens, self._state.pools
        prefills = self._candidates(pools.open_of_role("prefill"), request)
        if not prefills:
            self._shortest_prompt = min(self._shortest_prompt, num_tokens)
            return None
        decodes = self._candidates(pools.open_of_role("decode"), request)
        if not decodes:
            self._shortest_sequence = min(self._shortest_sequence, num_tokens)
            return None
        need = Need.of(request, prefills[0], self._state.table.next_dispatch)
        if self._policy == "hybrid" and need.first is not None:
            prefills = _with(prefills, pools.open_of_role("prefill").caching(need.first, num_tokens))
            decodes = _with(decodes, pools.open_of_role("decode").caching(need.first, num_tokens))
        return choose_prefill(self._policy, prefills, need), choose_decode(self._policy, decodes, need)

    def _candidates(self, workers: OpenWorkers[Worker], request: Request) -> list[Worker]:
        """Of those with room: for the hybrid, whoever may be the best, if nobody caches anything. A session's own worker is found among all
        of these; else some will do."""
        if self._policy != "hybrid":
            return workers.with_room(request.num_tokens)
        return workers.best(request.num_tokens, self._state.table.next_dispatch, None if request.session else MOST_COMPARED)

    def _fitting_pair(self, request: Request) -> Pair | None:
        """In all other cases."""
        num_tokens, state = request.num_tokens, self._state
        prefills = [w for w in state.pools.open_of_role("prefill") if self._prefill_has_room(w, request, num_tokens)]
        if not prefills:
            self._shortest_prompt = min(self._shortest_prompt, num_tokens)
            return None
        decodes = state.pools.open_of_role("decode").with_room(num_tokens)
        if request.avoid is not None:
            decodes = [w for w in decodes if w is not request.avoid and w.kind == request.avoid.kind] or decodes
        if len(state.suspicion):
            prefills, decodes = state.suspicion.allowed(request, prefills), state.suspicion.allowed(request, decodes)
        prefills = that_hold(request.max_tokens, prefills, state.pools.open_of_role("prefill"))
        decodes = that_hold(request.max_tokens, decodes, state.pools.open_of_role("decode"))
        prefills, decodes = that_fit(prefills, decodes)
        if not prefills or not decodes:
            self._unsure = True
            return None
        return self._choose(request, prefills, decodes)

    def _choose(self, request: Request, prefills: list[Worker], decodes: list[Worker]) -> Pair:
        need = Need.of(request, prefills[0], self._state.table.next_dispatch)
        if self._state.pools.has_mixed:
            return choose_pair(self._policy, prefills, decodes, need)
        prefill = choose_prefill(self._policy, prefills, need)
        return prefill, choose_decode(self._policy, [w for w in decodes if w.kind == prefill.kind], need)

    def _prefill_has_room(self, worker: Worker, request: Request, num_tokens: int) -> bool:
        if num_tokens >= worker.max_model_len:
            return False
        if not request.num_attempts:
            return worker.room >= num_tokens
        if not worker.accepting and worker.dispatches:
            return False
        waiting = self._returning_tokens(worker)  # it goes before those that are computed for the first time
        return waiting == 0 or waiting + num_tokens <= worker.most_ahead

    def _returning_tokens(self, worker: Worker) -> int:
        """Of prompts dispatched to this prefill worker and not yet computed, those of requests that have come back."""
        requests = self._state.table.by_dispatch
        return sum(num_tokens for dispatch, num_tokens in worker.pending.items() if requests[dispatch].num_attempts > 1)

    def _dispatch(self, request: Request, prefill: Worker, decode: Worker, now: float) -> None:
        self._state.table.assign(request, prefill, decode)
        if request.recovery is not None:
            request.recovery.dispatched = now
            request.recovery.absent_s = max(0.0, self._state.gap_ended - request.recovery.noticed)
            request.recovery.num_attempts += 1
        self._state.book_stall(request, now)
        request.enter("prefill", now)
        request.times = AttemptTimes(request.ledger)
        self._state.actions.append(Send(prefill.id, Prefill(spec=request.spec(self._state.incarnation, now), decode=decode.peer)))


def _with(workers: list[Worker], more: list[Worker]) -> list[Worker]:
    return list(dict.fromkeys([*workers, *more])) if more else workers
