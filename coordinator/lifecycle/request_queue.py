"""The requests that wait in the coordinator for workers with room: in what order they are tried. Pure.

    priority classes  share what the workers give by weight, premium : standard : free : batch = 64 : 16 : 4 : 1
    tenants           of one class share its part equally, counted in tokens
    one tenant's      requests go by their priority, then by arrival

Before all of them go requests that come back from a lost attempt, by arrival: they have waited their turn once, and their streams stand
still. None of the others overtakes them.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from .fair_shares import Shares
from .request import PriorityClass, Request

LOOK_AHEAD = 32
"""So many of a tenant's requests are tried when there may be room, and four times as many of all."""
WEIGHTS: dict[PriorityClass, float] = {"premium": 64.0, "standard": 16.0, "free": 4.0, "batch": 1.0}
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""What a token costs: one that is generated holds its blocks and a row longer (the paper's weights)."""
Entry = tuple[int, float, int, Request, int]
"""Priority, arrival, tie-break; and how many tokens."""


@dataclass(slots=True)
class _Tenant:
    entries: list[Entry] = field(default_factory=list)  # sorted
    num_tokens: int = 0


@dataclass(slots=True)
class _Class:
    weight: float
    tenants: dict[str, _Tenant] = field(default_factory=dict)  # those that wait
    shares: Shares = field(default_factory=Shares)

    def num_tokens(self) -> int:
        return sum(tenant.num_tokens for tenant in self.tenants.values())


class RequestQueue:
    """Who does not fit is overtaken, but not for long."""

    def __init__(self, starving_s: float) -> None:
        """``starving_s``: who has waited so long is not overtaken any more."""
        self._starving_s = starving_s
        self._classes: dict[PriorityClass, _Class] = {name: _Class(weight) for name, weight in WEIGHTS.items()}
        self._shares = Shares()
        self._entries: dict[Request, Entry] = {}
        self._returning: list[Entry] = []  # sorted by arrival
        self._num_joined = 0
        self.num_changes = 0  # who waits has changed so often
        self.num_orders = 0  # whose turn it is, where several wait, may have changed so often, though the same wait

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._entries))

    def lengths(self) -> dict[PriorityClass, int]:
        """Requests that wait, by class."""
        back = Counter(entry[3].priority_class for entry in self._returning)
        return {name: back[name] + sum(len(t.entries) for t in line.tenants.values()) for name, line in self._classes.items()}

    def join(self, request: Request) -> None:
        """One more waits."""
        self.num_changes += 1
        if request.num_attempts:
            self._num_joined += 1
            self._entries[request] = (0, request.arrival, self._num_joined, request, request.num_tokens)
            bisect.insort(self._returning, self._entries[request])
            return
        line = self._classes[request.priority_class]
        if not line.tenants:
            self._shares.joins(request.priority_class, [name for name, other in self._classes.items() if other.tenants])
        if request.tenant not in line.tenants:
            line.shares.joins(request.tenant, line.tenants)
            line.tenants[request.tenant] = _Tenant()
        self._num_joined += 1
        entry = (request.priority, request.arrival, self._num_joined, request, request.num_tokens)
        tenant = line.tenants[request.tenant]
        bisect.insort(tenant.entries, entry)
        tenant.num_tokens += request.num_tokens
        self._entries[request] = entry

    def leave(self, request: Request) -> None:
        """It waits no more."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        self.num_changes += 1
        at = bisect.bisect_left(self._returning, entry)
        if at < len(self._returning) and self._returning[at] is entry:
            del self._returning[at]
            return
        line = self._classes[request.priority_class]
        tenant = line.tenants[request.tenant]
        del tenant.entries[bisect.bisect_left(tenant.entries, entry)]
        tenant.num_tokens -= entry[4]
        if not tenant.entries:
            del line.tenants[request.tenant]
            line.shares.leaves(request.tenant)
            if not line.tenants:
                self._shares.leaves(request.priority_class)

    @property
    def anybody_returns(self) -> bool:
        """Whether requests wait that were dispatched before."""
        return bool(self._returning)

    def charge(self, request: Request) -> None:
        """Books what the request has been given since it was last booked: what was computed of its prompt, and its output tokens."""
        if (service := _service(request)) != 0.0:
            line = self._classes[request.priority_class]
            line.shares.charge(request.tenant, service)
            self._shares.charge(request.priority_class, service / line.weight)

    def charge_running(self, requests: Iterable[Request]) -> None:
        """Books what those of these have been given that are dispatched and have more tokens than when they were last booked. Now it may be
        another's turn, by this and by what has been booked in between."""
        self.num_orders += 1
        for request in requests:
            if request.dispatch >= 0 and len(request.tokens) != request.num_charged_tokens:
                self.charge(request)

    def pass_by(self, request: Request) -> None:
        """Books a request that was placed without joining, since nobody waits: as if it had joined, been served and left."""
        assert not self._entries, "others wait: it must join"
        service, line = _service(request), self._classes[request.priority_class]
        line.shares.passes(request.tenant, service)
        self._shares.passes(request.priority_class, service / line.weight)

    def tokens_ahead(self, priority_class: PriorityClass, tenant: str) -> float:
        """Prompt tokens that would be served before a request that joins now: by the counters, in the order of ``serve``."""
        if not self._entries:
            return 0.0
        line = self._classes[priority_class]
        own = line.tenants.get(tenant)
        own_tokens = float(own.num_tokens) if own is not None else 0.0
        least = min(map(line.shares.counter, line.tenants), default=0.0)
        turn = own_tokens + (line.shares.counter(tenant) if own is not None else max(line.shares.counter(tenant), least))
        ahead = own_tokens
        for name, other in line.tenants.items():
            if name != tenant:
                ahead += min(float(other.num_tokens), max(0.0, turn - line.shares.counter(name)))
        class_turn = self._shares.counter(priority_class) + ahead / line.weight
        if not line.tenants:
            waiting = [name for name, other in self._classes.items() if other.tenants]
            class_turn = max(class_turn, min(map(self._shares.counter, waiting), default=0.0))
        for class_name, other_class in self._classes.items():
            if class_name != priority_class and other_class.tenants:
                turns = max(0.0, class_turn - self._shares.counter(class_name))
                ahead += min(float(other_class.num_tokens()), turns * other_class.weight)
        return ahead

    def serve(self, place: Callable[[Request], bool], now: float) -> bool:
        """Places from the head of the line whatever finds room. Whether, however the shares stand, any that is left and could have come
        next has been tried, or another that is no longer than it."""
        return self._serve_returning(place, now) and self._serve_new(place, now)

    def _serve_returning(self, place: Callable[[Request], bool], now: float) -> bool:
        """Whether others may be served too."""
        for entry in list(self._returning):
            request = entry[3]
            if now < request.not_before:
                continue
            if place(request):
                self.charge(request)
                self.leave(request)
            elif not request.suspect:
                return False
        return True

    def _serve_new(self, place: Callable[[Request], bool], now: float) -> bool:
        if len(self._entries) == 1 and not self._returning:  # mostly
            (request,) = self._entries
            if place(request):
                self.charge(request)
                self.leave(request)
            return True
        turns = self._turns()
        too_long = inf  # where a prompt finds no room, no longer one does
        while turns.num_passed_over < 4 * LOOK_AHEAD:
            if (entry := turns.next()) is None:
                return True
            request, num_tokens = entry[3:]
            if num_tokens < too_long and place(request):
                self.charge(request)
                self.leave(request)
                turns.served()
            elif now - request.arrival > self._starving_s:
                return turns.in_fixed_order
            else:
                too_long = min(too_long, num_tokens)
                turns.pass_over()
        return False

    def _turns(self) -> _Turns | _OnlyTenant:
        waiting = [tenants for line in self._classes.values() if (tenants := line.tenants)]
        if len(waiting) == 1 and len(waiting[0]) == 1:  # mostly
            return _OnlyTenant(next(iter(waiting[0].values())))
        return _Turns(self._classes, self._shares)


def _service(request: Request) -> float:
    """What it has been given since it was last asked."""
    prompt = len(request.prompt_token_ids) - (request.num_cached_tokens or 0) if request.num_attempts else 0
    cost = PROMPT_WEIGHT * max(0, prompt) + OUTPUT_WEIGHT * len(request.tokens)
    service, request.charged, request.num_charged_tokens = cost - request.charged, cost, len(request.tokens)
    return service


class _OnlyTenant:
    """``_Turns`` where but one tenant's requests wait: in their order."""

    in_fixed_order = True

    def __init__(self, tenant: _Tenant) -> None:
        self._entries = tenant.entries
        self.num_passed_over = 0

    def next(self) -> Entry | None:
        at = self.num_passed_over
        return self._entries[at] if at < LOOK_AHEAD and at < len(self._entries) else None

    def served(self) -> None:
        """It has left the entries."""

    def pass_over(self) -> None:
        self.num_passed_over += 1


class _Turns:
    """Whose turn it is, while the line is served; who was passed over waits for another time. Shares change the order."""

    in_fixed_order = False

    def __init__(self, classes: dict[PriorityClass, _Class], shares: Shares) -> None:
        self._classes, self._shares = classes, shares
        self._heaps: dict[PriorityClass, list[tuple[float, str, int]]] = {
            name: [(line.shares.counter(tenant), tenant, 0) for tenant in line.tenants] for name, line in classes.items() if line.tenants
        }
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._at: PriorityClass | None = None
        self.num_passed_over = 0

    def next(self) -> Entry | None:
        """The next request to be tried; None: there is none."""
        if not self._heaps:
            return None
        at = min(self._heaps, key=self._shares.counter)
        self._at, (_, tenant, index) = at, self._heaps[at][0]
        return self._classes[at].tenants[tenant].entries[index]

    def served(self) -> None:
        """It was placed and has left; its tenant has been charged."""
        self._move_on(0)

    def pass_over(self) -> None:
        """It stays where it is; its tenant's next one is tried in its turn."""
        self.num_passed_over += 1
        self._move_on(1)

    def _move_on(self, step: int) -> None:
        assert self._at is not None, "next() comes first"
        heap, line = self._heaps[self._at], self._classes[self._at]
        _, tenant, index = heap[0]
        waiting = line.tenants.get(tenant)
        if waiting is not None and index + step < min(len(waiting.entries), LOOK_AHEAD):
            heapq.heapreplace(heap, (line.shares.counter(tenant), tenant, index + step))
        else:
            heapq.heappop(heap)
            if not heap:
                del self._heaps[self._at]
