"""Requests whose adapter only some workers have: where they may go, and that they hold up no others. Pure.

Others overtake such a request. Once it has waited for too long, they leave the workers that have its adapter
to it: all of these decode workers, and where one has room, but no prefill worker, the prefill workers, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from math import inf
from typing import NamedTuple, get_args

from ...transport.messages.messages import Role
from .pools import Pools
from .request import Request
from .request_queue import RequestQueue
from .worker import WorkerRecord


class Overtaking:
    """What one pass over the queue finds; ``all_have`` remembers its answers."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._all_have: dict[str, bool] = {}  # by adapter, at these versions
        self._versions: tuple[int, ...] = ()
        self.turned_away: dict[str, float] = {}  # by adapter, tokens: no room for them
        self._kept_free: dict[Role, set[str]] = {"prefill": set(), "decode": set()}
        """Adapters whose workers others leave alone."""

    def begin_pass(self) -> None:
        """Forget what the last pass over the queue has found."""
        self.turned_away = {}
        for adapters in self._kept_free.values():
            adapters.clear()

    def all_have(self, adapter: str) -> bool:
        """Whether each worker that takes new work, without reserves, has this adapter."""
        if not adapter:
            return True
        prefills, decodes = self._pools.open_of_role("prefill"), self._pools.open_of_role("decode")
        versions = self._pools.adapters.version, prefills.version, decodes.version
        if versions != self._versions:
            self._versions, self._all_have = versions, {}
        if (known := self._all_have.get(adapter)) is None:
            known = self._all_have[adapter] = all(w.has(adapter) for w in chain(prefills, decodes))
        return known

    def may_go_anywhere(self, request: Request) -> bool:
        """Whether all workers have its adapter, and none is left to other requests."""
        return not self._kept_free["decode"] and (not request.adapter or self.all_have(request.adapter))

    def cannot_be_placed(self, request: Request) -> bool:
        """Whether no workers serve its adapter, or none had room for a shorter one with it in this pass."""
        adapter = request.adapter
        if adapter and not self._pools.adapters.serves(adapter):
            return True
        return not request.num_attempts and request.num_tokens >= self.turned_away.get(adapter, inf)

    def turn_away(self, request: Request) -> None:
        """Note that it was not placed for lack of room; a suspect may wait for something else."""
        if request.suspect:
            return
        least = self.turned_away.get(request.adapter, inf)
        self.turned_away[request.adapter] = min(request.num_tokens, least)

    def lack_room(self, turned_away: Mapping[str, float]) -> bool:
        """Whether still no two workers that have the same of these adapters have room for as many tokens."""
        pools, roles = self._pools, get_args(Role)
        workers = [[*pools.open_of_role(role), *pools.reserves_of_role(role)] for role in roles]
        return not any(
            all(any(w.room >= least and w.has(adapter) for w in of_role) for of_role in workers)
            for adapter, least in turned_away.items()
        )

    def usable(self, workers: Iterable[WorkerRecord], request: Request) -> list[WorkerRecord]:
        """Return the workers that have the request's adapter and are not left to other requests."""
        adapter, kept_free = request.adapter, self._kept_free
        if not (adapter or kept_free["decode"]):
            return list(workers)
        return [w for w in workers if w.has(adapter) and kept_free[w.role].isdisjoint(w.contents)]

    def keep_free(self, request: Request, lacks_prefill: bool) -> None:
        """Leave the workers that have its adapter to one that has waited for too long and is no suspect."""
        if not request.suspect and self._pools.adapters.serves(request.adapter):
            self._kept_free["decode"].add(request.adapter)
            if lacks_prefill:
                self._kept_free["prefill"].add(request.adapter)


class Blocked(NamedTuple):
    """Proof that another pass over the queue would place nothing.

    Holds until the queue or the workers change, or a worker has room for the shortest request that was turned
    away; of those whose adapter only some workers have, two of these.
    """

    queue_version: int
    pools_version: int
    order_version: int | None  # None: holds whatever the order
    shortest_prompt: float  # tokens; no prefill worker had room for it
    shortest_sequence: float  # tokens; no decode worker had room for it
    turned_away: Mapping[str, float]  # as Overtaking has it

    def keeps(self, request: Request) -> bool:
        """Whether one no longer than this was turned away."""
        least = min(self.shortest_prompt, self.shortest_sequence, self.turned_away.get(request.adapter, inf))
        return request.num_tokens >= least

    def holds(self, queue: RequestQueue, pools: Pools, overtaking: Overtaking) -> bool:
        """Whether nothing has changed since the pass that could help."""
        return (
            self.queue_version == queue.version
            and self.pools_version == pools.version
            and self.order_version in (None, queue.order_version)
            and pools.open_of_role("prefill").max_room < self.shortest_prompt
            and pools.open_of_role("decode").max_room < self.shortest_sequence
            and pools.reserves_of_role("prefill").max_room < self.shortest_prompt
            and pools.reserves_of_role("decode").max_room < self.shortest_sequence
            and overtaking.lack_room(self.turned_away)
        )
