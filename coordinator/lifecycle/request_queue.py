"""The requests that wait for workers with room, and the order in which they are tried. Pure.

    retries           come first, by arrival: their streams stand still, and no other request overtakes them
    priority classes  share the workers' service by weight (``WEIGHTS``)
    tenants           of one class share its part equally, counted in tokens
    one tenant's      requests go by priority, then by arrival

The shares are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024), Algorithm 2 with weights. Two members that both wait all the time differ in service per weight by at
most one batch, however much more one of them asks for, so none starves.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from .request import PriorityClass, Request
from .shares import Shares

LOOK_AHEAD = 32
"""Requests of one tenant that are tried in a pass, and a quarter of all that are."""
WEIGHTS: dict[PriorityClass, float] = {"premium": 64.0, "standard": 16.0, "free": 4.0, "batch": 1.0}
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Cost of a token, as in the paper: a generated one holds its blocks and a row for longer."""
Tried = Literal["placed", "waits", "aside"]
"""``aside``: it waits for something that others do not need, and they may overtake it."""
Entry = tuple[int, float, int, Request, int]
"""Priority, arrival, tie-break, request, number of tokens."""


@dataclass(slots=True)
class _Tenant:
    entries: list[Entry] = field(default_factory=list)  # sorted
    num_tokens: int = 0


@dataclass(slots=True)
class _Class:
    weight: float
    tenants: dict[str, _Tenant] = field(default_factory=dict)  # those with waiting requests
    shares: Shares = field(default_factory=Shares)

    def num_tokens(self) -> int:
        return sum(tenant.num_tokens for tenant in self.tenants.values())


class RequestQueue:
    """The waiting requests. One without room is overtaken until ``starving_s`` seconds after its arrival."""

    def __init__(self, starving_s: float) -> None:
        self._starving_s = starving_s
        self._classes: dict[PriorityClass, _Class] = {
            name: _Class(weight) for name, weight in WEIGHTS.items()
        }
        self._shares = Shares()
        self._entries: dict[Request, Entry] = {}
        self._retries: list[Entry] = []  # sorted by arrival
        self._num_added = 0
        self.num_tokens = 0  # of all that wait
        self.version = 0  # incremented whenever a request is added or removed
        self.order_version = 0  # incremented whenever shares may have changed the order

    def __len__(self) -> int:
        return len(self._entries)

    def full(self, most: int) -> str:
        """Return why no request may join, as a sentence; empty while fewer than ``most`` wait."""
        return f"{len(self)} requests are waiting already" if len(self) >= most else ""

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._entries))

    @property
    def has_retries(self) -> bool:
        """Whether requests wait that were dispatched before."""
        return bool(self._retries)

    def add(self, request: Request) -> None:
        """Begin to wait."""
        self.version += 1
        self._num_added += 1
        self.num_tokens += request.num_tokens
        if request.num_attempts:
            entry = (0, request.arrival, self._num_added, request, request.num_tokens)
            self._entries[request] = entry
            bisect.insort(self._retries, entry)
            return
        members = self._classes[request.priority_class]
        if not members.tenants:
            waiting = [name for name, other in self._classes.items() if other.tenants]
            self._shares.join(request.priority_class, waiting)
        if request.tenant not in members.tenants:
            members.shares.join(request.tenant, members.tenants)
            members.tenants[request.tenant] = _Tenant()
        entry = (request.priority, request.arrival, self._num_added, request, request.num_tokens)
        tenant = members.tenants[request.tenant]
        bisect.insort(tenant.entries, entry)
        tenant.num_tokens += request.num_tokens
        self._entries[request] = entry

    def remove(self, request: Request) -> None:
        """End to wait; a request that does not wait is ignored."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        self.version += 1
        self.num_tokens -= entry[4]
        at = bisect.bisect_left(self._retries, entry)
        if at < len(self._retries) and self._retries[at] is entry:
            del self._retries[at]
            return
        members = self._classes[request.priority_class]
        tenant = members.tenants[request.tenant]
        del tenant.entries[bisect.bisect_left(tenant.entries, entry)]
        tenant.num_tokens -= entry[4]
        if not tenant.entries:
            del members.tenants[request.tenant]
            members.shares.leave(request.tenant)
            if not members.tenants:
                self._shares.leave(request.priority_class)

    # --- fair shares ---------------------------------------------------------------------------------

    def charge(self, request: Request) -> None:
        """Charge the prompt and output tokens computed since the request was last charged."""
        if (service := _service(request)) != 0.0:
            members = self._classes[request.priority_class]
            members.shares.charge(request.tenant, service)
            self._shares.charge(request.priority_class, service / members.weight)

    def charge_running(self, requests: Iterable[Request]) -> None:
        """Charge the dispatched requests that have new tokens. This may change the order of the others."""
        self.order_version += 1
        for request in requests:
            if request.dispatch >= 0 and len(request.tokens) != request.num_charged_tokens:
                self.charge(request)

    def charge_unqueued(self, request: Request) -> None:
        """Charge a request that was placed at once, as if it had been added, served and removed."""
        assert not self._entries, "others wait: it must be added"
        service, members = _service(request), self._classes[request.priority_class]
        members.shares.serve_at_once(request.tenant, service)
        self._shares.serve_at_once(request.priority_class, service / members.weight)

    def tokens_ahead(self, priority_class: PriorityClass, tenant: str) -> float:
        """Return the prompt tokens that ``serve`` would take before a request that is added now."""
        if not self._entries:
            return 0.0
        members = self._classes[priority_class]
        own = members.tenants.get(tenant)
        own_tokens = float(own.num_tokens) if own is not None else 0.0
        least = min(map(members.shares.counter, members.tenants), default=0.0)
        counter = members.shares.counter(tenant)
        turn = own_tokens + (counter if own is not None else max(counter, least))
        ahead = own_tokens
        for name, other in members.tenants.items():
            if name != tenant:
                ahead += min(float(other.num_tokens), max(0.0, turn - members.shares.counter(name)))
        class_turn = self._shares.counter(priority_class) + ahead / members.weight
        if not members.tenants:
            waiting = [name for name, other in self._classes.items() if other.tenants]
            class_turn = max(class_turn, min(map(self._shares.counter, waiting), default=0.0))
        for class_name, other_class in self._classes.items():
            if class_name != priority_class and other_class.tenants:
                turns = max(0.0, class_turn - self._shares.counter(class_name))
                ahead += min(float(other_class.num_tokens()), turns * other_class.weight)
        return ahead

    # --- a pass over the queue -----------------------------------------------------------------------

    def is_starving(self, request: Request, now: float) -> bool:
        """Whether it waits before all others, or for too long to be overtaken by one that needs its room."""
        return bool(request.num_attempts) or now - request.arrival > self._starving_s

    def serve(self, place: Callable[[Request], Tried], now: float) -> bool:
        """Try requests from the head of the queue; ``place`` dispatches one if it can.

        Return whether every request that is left, and could come first under any shares, has been tried, or
        is at least as long as one that was.
        """
        return self._serve_retries(place, now) and self._serve_new(place, now)

    def _serve_retries(self, place: Callable[[Request], Tried], now: float) -> bool:
        """Return whether other requests may be served too."""
        for entry in list(self._retries):
            request = entry[3]
            if now < request.not_before:
                continue
            if (tried := place(request)) == "placed":
                self.charge(request)
                self.remove(request)
            elif tried == "waits" and not request.suspect:
                return False
        return True

    def _serve_new(self, place: Callable[[Request], Tried], now: float) -> bool:
        if len(self._entries) == 1 and not self._retries:  # the usual case
            (request,) = self._entries
            if place(request) == "placed":
                self.charge(request)
                self.remove(request)
            return True
        turns = _Turns(self._classes, self._shares)
        too_long = inf  # where a prompt finds no room, no longer one does
        while turns.num_passed_over < 4 * LOOK_AHEAD:
            if (entry := turns.next()) is None:
                return True
            request, num_tokens = entry[3:]
            tried = place(request) if num_tokens < too_long or request.adapter else "waits"
            if tried == "waits":
                if now - request.arrival > self._starving_s:
                    return turns.in_fixed_order
                too_long = min(too_long, inf if request.answer_id else num_tokens)  # inf: not for room
                turns.pass_over()
            elif tried == "aside":
                turns.step_aside()
            else:
                self.charge(request)
                self.remove(request)
                turns.served()
        return False


def _service(request: Request) -> float:
    """Return the request's service since the last call for it, in weighted tokens."""
    prompt = len(request.prompt_token_ids) - (request.num_cached_tokens or 0) if request.num_attempts else 0
    cost = PROMPT_WEIGHT * max(0, prompt) + OUTPUT_WEIGHT * len(request.tokens)
    service, request.charged, request.num_charged_tokens = cost - request.charged, cost, len(request.tokens)
    return service


class _Turns:
    """Yields the next request by the shares, which change while the queue is served."""

    def __init__(self, classes: dict[PriorityClass, _Class], shares: Shares) -> None:
        self._classes, self._shares = classes, shares
        self._heaps: dict[PriorityClass, list[tuple[float, str, int]]] = {
            name: [(members.shares.counter(tenant), tenant, 0) for tenant in members.tenants]
            for name, members in classes.items()
            if members.tenants
        }
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._at: PriorityClass | None = None
        self.num_passed_over = self._num_aside = 0
        self.in_fixed_order = sum(map(len, self._heaps.values())) == 1  # one tenant's own order

    def next(self) -> Entry | None:
        """Return the next request to be tried; None: there is none."""
        if not self._heaps:
            return None
        at = min(self._heaps, key=self._shares.counter)
        self._at, (_, tenant, index) = at, self._heaps[at][0]
        return self._classes[at].tenants[tenant].entries[index]

    def served(self) -> None:
        """Go on: the request has been removed, and its tenant charged."""
        self._advance(0)

    def pass_over(self) -> None:
        """Go on: the request stays, and its tenant's next one is tried in its turn."""
        self.num_passed_over += 1
        self._advance(1)

    def step_aside(self) -> None:
        """Go on: the request stays, and is not counted."""
        self._num_aside += 1
        self._advance(1)

    def _advance(self, step: int) -> None:
        assert self._at is not None, "next() comes first"
        heap, members = self._heaps[self._at], self._classes[self._at]
        _, tenant, index = heap[0]
        waiting = members.tenants.get(tenant)
        if waiting is not None and index + step < min(len(waiting.entries), LOOK_AHEAD + self._num_aside):
            heapq.heapreplace(heap, (members.shares.counter(tenant), tenant, index + step))
        else:
            heapq.heappop(heap)
            if not heap:
                del self._heaps[self._at]
