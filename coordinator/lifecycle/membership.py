"""Workers come, report, drain and go; what was assigned to who is gone is tried elsewhere. Pure."""

from __future__ import annotations

from ...transport.messages.messages import Alive, Drain, Fenced, Hello, Load, Welcome, from_u32
from .actions import Send
from .attempts import Attempts
from .evacuation import Evacuation
from .flips import Flips
from .routing import Policy
from .state import LifecycleState
from .worker import Worker, WorkerId

DRAINED = "drained"
"""Why a worker that left in good order is gone."""
FIND_OUT_LOOKS = 4
"""So many times after a connection has ended everybody is spoken to: what is sent in the first moments may seem to reach who is gone.
Counted, not timed: a coordinator that stands still just then would have asked once, too early."""


class Membership:
    """Who is here, and what becomes of the requests of those who leave."""

    def __init__(self, state: LifecycleState, attempts: Attempts, policy: Policy) -> None:
        self._state, self._attempts = state, attempts
        self._alive = Alive(coordinator=state.incarnation)
        self.evacuation = Evacuation(state.table, state.pools, policy, state.incarnation, state.limits.lost_after_s)
        self.flips = Flips(state)
        self._fenced: dict[WorkerId, float] = {}
        self._looks_to_find_out = 0  # whose connection has ended
        self.expected_until = float("-inf")  # who left in good order is expected back by then
        self.reasons_lost: dict[WorkerId, str] = {}
        self.num_workers_lost = 0
        self.num_workers_left = 0

    def hello(self, worker_id: WorkerId, hello: Hello, now: float) -> None:
        """A worker introduces itself, or a new incarnation of one does."""
        if worker_id != (hello.worker_id, hello.incarnation):
            return  # the socket says another name than the message
        gap = self._state.pools.gap
        for replaced in self._state.pools.add(hello, now):
            self.lose(replaced, "restarted", now)
        if gap and not self._state.pools.gap:
            self._state.gap_ended = now
        if hello.process:
            self.flips.hello(self._state.pools.workers[worker_id], now)
        self._welcome(worker_id)

    def load(self, worker: Worker, load: Load, now: float) -> None:
        """A heartbeat: who holds what is compared, and what was not heard is said again."""
        self._state.pools.hear(load, now)
        if worker.role == "prefill":
            self._state.forecast.hear(worker, load)
        held = set(from_u32(load.dispatches))
        worker.held, worker.held_at = held, now
        alive = Alive(coordinator=self._state.incarnation, misfit=worker.misfit) if worker.misfit else self._alive
        self._state.send(worker, alive)
        if worker.drain is not None:  # it has not heard yet
            self._state.send(worker, worker.drain)
        if load.num_cache_reports > worker.num_cache_reports and now - worker.asked_for_cache >= self._state.limits.lost_after_s:
            worker.asked_for_cache = now
            self._welcome(worker.id)
        orphans = sorted(held.difference(self._state.table.by_dispatch))
        if orphans:
            self._state.disown(worker, orphans)
        if worker.draining:
            self.evacuate(now)

    def drain(self, worker_id: str, timeout_s: float | None) -> Worker | None:
        """This worker is to leave: it gets no new work from now on. None: no such worker is here."""
        worker = next((w for w in self._state.pools.workers.values() if w.hello.worker_id == worker_id), None)
        if worker is not None:
            order = Drain(coordinator=self._state.incarnation, timeout_s=timeout_s)
            self._state.pools.close(worker, order)
            self._state.send(worker, order)
        return worker

    def ended(self, worker: Worker, now: float) -> None:
        """Its process is known to have ended."""
        if worker.draining:
            self.goodbye(worker, now)  # its own goodbye may still be on the way
        else:
            self.lose(worker, "its process has ended", now)

    def look(self, now: float) -> None:
        """Gives up who is dead, and says something to who has been silent: whether it can be reached shows in sending."""
        for worker, reason in self._state.pools.dead(now):
            self.lose(worker, reason, now)
        pools = self._state.pools
        finds_out = self._looks_to_find_out > 0
        self._looks_to_find_out -= finds_out
        for worker in list(pools.workers.values()) if finds_out else pools.overdue(self._state.limits.heartbeat_s, now):
            self._state.send(worker, self._alive)

    def connection_lost(self) -> None:
        """Of some worker: whose, shows in speaking to all."""
        self._looks_to_find_out = FIND_OUT_LOOKS

    def fence(self, worker_id: WorkerId, now: float) -> None:
        """Whoever is not known here takes a new incarnation, and says hello."""
        if now - self._fenced.get(worker_id, -1e9) >= 1.0:
            self._fenced = {w: t for w, t in self._fenced.items() if now - t < 60.0}
            self._fenced[worker_id] = now
            fenced = Fenced(coordinator=self._state.incarnation, reason="this incarnation is not known, or was declared dead")
            self._state.actions.append(Send(worker_id, fenced))

    def lose(self, worker: Worker, reason: str, now: float) -> None:
        """This worker is dead: who ran there goes on elsewhere."""
        self._state.pools.remove(worker)
        self._state.forecast.forget(worker)
        self.flips.gone(worker, now)
        self.num_workers_lost += 1
        held = len(worker.dispatches)
        self._remember_lost(worker, f"{reason}; requests it held, now tried again: {held}" if held else reason)
        told = f"{worker.role} worker {worker.hello.worker_id} was lost ({reason})"
        for request in self._state.suspicion.charge(worker):
            ever = f" ({request.num_deaths_ever} in all)" if request.num_deaths_ever > request.num_deaths else ""
            died = f"{request.num_deaths} workers in a row died while they ran this request{ever}, the last time apart from other suspects"
            self._attempts.fail(request, "failed", f"{died}; it is not tried again. The last: {told}", now)
        self._give_back(worker, told, now)

    def goodbye(self, worker: Worker, now: float) -> None:
        """A worker that drained has left."""
        self._state.pools.remove(worker)
        self._state.forecast.forget(worker)
        self.flips.gone(worker, now)
        self.num_workers_left += 1
        self.expected_until = now + self._state.limits.unserved_s
        self._remember_lost(worker, DRAINED)
        self._give_back(worker, f"{worker.role} worker {worker.hello.worker_id} has left", now, drained=True)

    def evacuate(self, now: float) -> None:
        """Decode workers that drain hand over what they run; prompts that are computed for them go elsewhere."""
        for worker in self._state.pools.of_role("decode"):
            if worker.draining and self.evacuation.has_successor(worker):
                for request in self.evacuation.misdirected(worker):
                    self._attempts.retry(request, "its decode worker leaves", now, counts=False)
                self._state.actions += self.evacuation.orders(worker, now)

    def _give_back(self, worker: Worker, reason: str, now: float, drained: bool = False) -> None:
        """What was assigned to a worker that is here no more is tried elsewhere. That is no fault of the requests."""
        for dispatch in sorted(worker.dispatches):
            request = self._state.table.by_dispatch[dispatch]
            if request.move is not None and request.move.target is worker:
                self._state.actions += self.evacuation.give_up(request, now)
            elif request.state == "decode" and worker is request.prefill:
                request.prefill = None
            elif request.move is not None and drained:
                self.evacuation.handed_over(request, now)
            else:
                self._attempts.retry(request, reason, now, counts=False)

    def _welcome(self, worker_id: WorkerId) -> None:
        welcome = Welcome(
            coordinator=self._state.incarnation, heartbeat_s=self._state.limits.heartbeat_s, others=self._state.limits.siblings
        )
        self._state.actions.append(Send(worker_id, welcome))

    def _remember_lost(self, worker: Worker, reason: str) -> None:
        self.reasons_lost = {**dict(list(self.reasons_lost.items())[-63:]), worker.id: reason}
