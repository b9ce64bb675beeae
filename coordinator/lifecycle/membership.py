"""Workers come, report, drain and go; what was assigned to a worker that is gone is tried elsewhere. Pure.

When a worker dies:

1. It is noticed: its process ends, its connection stays away for ``unreachable_s``, it is silent for
   ``dead_after_s``, or busy without a step for ``progress_timeout_s`` (``Pools.dead``); or it sends Hello
   under a new incarnation. One of the same name on another host waits until then: a node that was cut off
   and comes back may hold the worker whose successor runs elsewhere.
2. ``lose`` removes it from the pools, so that nothing is routed to it. If it lives, it is fenced: it takes a
   new incarnation.
3. ``Suspicion`` counts the death against the requests that it ran. A request with too many deaths ends.
4. Every other request returns to the queue, before all new ones (``RequestStateMachine.retry``), and Cancel
   goes to its other worker, which frees its blocks. A request in decode is untouched where only its prefill
   worker died.
5. Placement dispatches it under a new epoch and dispatch number, with its prompt and the tokens that the
   client has. The stream goes on at the next index.

Meanwhile a prefill worker that was sending blocks to it fails those handoffs (``HandoffSender.peer_lost``).
"""

from __future__ import annotations

from ...transport.messages.messages import (
    Alive,
    Drain,
    Fenced,
    Hello,
    Load,
    Message,
    OtherVersion,
    Welcome,
    from_u32,
)
from .actions import Action, Send
from .flips import Flips
from .forecast import Forecast
from .limits import LifecycleLimits
from .pools import Pools
from .state_machine import RequestStateMachine
from .worker import WorkerId, WorkerRecord

DRAINED = "drained"
"""The reason for which a worker that left in good order is gone."""
PROBES_AFTER_LOSS = 4
"""After a connection has ended, all workers are sent to at as many ticks: the first messages may still
seem to reach a dead one. Counted, not timed: a coordinator that stands still just then would send only
once, too early."""
FENCE_EVERY_S, FORGET_FENCED_S = 1.0, 60.0
FORGET_REFUSED_S = 10.0
"""A worker that is refused sends Hello again every second."""
OTHER_VOCABULARY = (
    "its tokenizer.json has another vocabulary than the coordinator's, so answers would be wrong text: "
    "start both with the same --model"
)

OTHER_SIZE = (
    "its model has {}, the coordinator's has {}: start both with the same --model, or the worker with the "
    "control address of its own (--coordinator)"
)


class Membership:
    """Knows which workers are here, and retries the requests of those that go."""

    def __init__(
        self,
        incarnation: int,
        limits: LifecycleLimits,
        pools: Pools,
        machine: RequestStateMachine,
        flips: Flips,
        forecast: Forecast,
    ) -> None:
        self._incarnation, self._limits = incarnation, limits
        self._pools, self._machine, self._flips, self._forecast = pools, machine, flips, forecast
        self._fenced: dict[WorkerId, float] = {}
        self._refused: dict[str, tuple[float, str]] = {}  # when last, and why, by worker id
        self._num_probes = 0  # that are still to be sent to all
        self.expected_until = float("-inf")  # workers that left in good order are expected back until then
        self.num_lost = 0
        self.num_left = 0

    # --- messages ------------------------------------------------------------------------------------

    def hello(self, worker_id: WorkerId, hello: Hello, now: float) -> list[Action]:
        """Take in a worker, or a new incarnation of one."""
        if worker_id != (hello.worker_id, hello.incarnation):
            return []  # the socket has another name than the message
        if why := self._objection(hello, now):
            return [Send(worker_id, Alive(coordinator=self._incarnation, misfit=why))]
        actions: list[Action] = []
        for replaced in self._pools.add(hello, now):
            actions += self.lose(replaced, "restarted", now)
        if hello.process:
            self._flips.came(self._pools.workers[worker_id], now)
        return [*actions, self._welcome(worker_id)]

    def _objection(self, hello: Hello, now: float) -> str:
        """Return why this worker is not taken in; empty: it is."""
        if (holder := self._pools.on_another_host(hello)) is not None:
            return f"a worker on {holder.host.partition('/')[0]} has the name {hello.worker_id}, and lives"
        why, ours = "", self._pools
        if hello.vocabulary and ours.vocabulary and hello.vocabulary != ours.vocabulary:
            why = OTHER_VOCABULARY
        elif hello.size and ours.size and hello.size != ours.size:
            why = OTHER_SIZE.format(hello.size, ours.size)
        if why:
            self._refused[hello.worker_id] = now, why
        return why

    def refuse(self, worker_id: WorkerId, hello: OtherVersion, now: float) -> list[Action]:
        """Answer a worker whose wire version is no neighbour of ours."""
        self._refused[worker_id[0]] = now, hello.sentence
        return [Send(worker_id, OtherVersion())]

    def refused(self, now: float) -> dict[str, str]:
        """Return the workers that are refused for their wire version or model, each with a sentence."""
        self._refused = {
            name: last for name, last in self._refused.items() if now - last[0] < FORGET_REFUSED_S
        }
        return {name: sentence for name, (_, sentence) in self._refused.items()}

    def load(self, worker: WorkerRecord, load: Load, now: float) -> list[Action]:
        """Take a heartbeat: compare what the worker holds, and repeat what it has not received."""
        self._pools.report(load, now)
        if worker.role == "prefill":
            self._forecast.report(worker, load)
        held = set(from_u32(load.dispatches))
        worker.held, worker.held_at = held, now
        replies: list[Message] = [self._alive(worker)]
        if worker.drain is not None:
            replies.append(worker.drain)
        actions: list[Action] = [Send(worker.id, reply) for reply in replies]
        if (
            load.num_cache_reports > worker.num_cache_reports
            and now - worker.welcomed_at >= self._limits.lost_after_s
        ):
            worker.welcomed_at = now
            actions.append(self._welcome(worker.id))  # it then reports its whole cache
        orphans = sorted(held.difference(self._machine.assignments.by_dispatch))
        return actions + self._machine.cancel_at([worker], orphans) if orphans else actions

    def fence(self, worker_id: WorkerId, now: float) -> list[Action]:
        """Have an unknown worker take a new incarnation and send Hello."""
        if now - self._fenced.get(worker_id, -1e9) < FENCE_EVERY_S:
            return []
        self._fenced = {w: t for w, t in self._fenced.items() if now - t < FORGET_FENCED_S}
        self._fenced[worker_id] = now
        reason = "it was restarted, or had declared this worker dead"
        return [Send(worker_id, Fenced(coordinator=self._incarnation, reason=reason))]

    # --- coming and going ------------------------------------------------------------------------------

    def drain(self, name: str, timeout_s: float | None) -> tuple[list[WorkerRecord], list[Action]]:
        """Have a worker, or every role of a process, leave: they get no new work from now on. Return them."""
        workers = self._pools.workers.values()
        leaving = [w for w in workers if name and name in (w.hello.process, w.hello.worker_id)]
        order = Drain(coordinator=self._incarnation, timeout_s=timeout_s)
        for worker in leaving:
            self._pools.close(worker, order)
        return leaving, [Send(worker.id, order) for worker in leaving]

    def check(self, now: float) -> list[Action]:
        """Give up dead workers, and send to silent ones: whether a worker can be reached shows in sending."""
        actions: list[Action] = []
        for worker, reason in self._pools.dead(now):
            actions += self.lose(worker, reason, now)
        probes_all = self._num_probes > 0
        self._num_probes -= probes_all
        silent = (
            list(self._pools.workers.values())
            if probes_all
            else self._pools.overdue(self._limits.heartbeat_s, now)
        )
        return [*actions, *(Send(worker.id, self._alive(worker)) for worker in silent)]

    def _alive(self, worker: WorkerRecord) -> Alive:
        return Alive(coordinator=self._incarnation, misfit=worker.misfit)

    def connection_lost(self) -> None:
        """Find out, with the next checks, which worker's connection has ended."""
        self._num_probes = PROBES_AFTER_LOSS

    def process_ended(self, worker: WorkerRecord, now: float) -> list[Action]:
        """Remove a worker whose process has ended."""
        if worker.draining:
            return self._let_go(worker, now)  # its own Goodbye may still be on the way
        return self.lose(worker, "its process has ended", now)

    def lose(self, worker: WorkerRecord, reason: str, now: float) -> list[Action]:
        """Remove a dead worker. Its requests go on elsewhere, except those that killed too many workers."""
        held = len(worker.dispatches)
        self._remove(worker, f"{reason}; requests it had a part in: {held}" if held else reason, now)
        self.num_lost += 1
        lost = f"{worker.role} worker {worker.hello.worker_id} was lost ({reason})"
        actions: list[Action] = []
        for request in self._machine.suspicion.charge(worker, self._machine.assignments.of(worker)):
            deaths, in_all = request.num_deaths, request.num_deaths_ever
            ever = f" ({in_all} in all)" if in_all > deaths else ""
            died = f"{deaths} workers in a row died while they ran this request{ever}"
            message = (
                f"{died}, the last time apart from other suspects; it is not tried again. The last: {lost}"
            )
            actions += self._machine.fail(request, "failed", message, now)
        return actions + self._give_back(worker, lost, now)

    def goodbye(self, worker: WorkerRecord, now: float) -> list[Action]:
        """Remove a worker that has drained. It waits for the answer."""
        answer = Send(worker.id, Fenced(coordinator=self._incarnation, reason="it has left"))
        return [answer, *self._let_go(worker, now)]

    def _let_go(self, worker: WorkerRecord, now: float) -> list[Action]:
        self._remove(worker, DRAINED, now)
        self.num_left += 1
        self.expected_until = now + self._limits.unserved_s
        left = f"{worker.role} worker {worker.hello.worker_id} has left"
        return self._give_back(worker, left, now, drained=True)

    def _remove(self, worker: WorkerRecord, reason: str, now: float) -> None:
        self._pools.remove(worker, reason)
        self._forecast.forget(worker)
        self._flips.gone(worker, now)

    def _give_back(
        self, worker: WorkerRecord, reason: str, now: float, drained: bool = False
    ) -> list[Action]:
        """Retry elsewhere what was assigned to a worker that is gone. That is no failure of the requests."""
        actions: list[Action] = []
        for request in self._machine.assignments.of(worker):
            if request.move is not None and request.move.target is worker:
                actions += self._machine.give_up_move(request, now)
            elif request.state == "decode" and worker is request.prefill:
                request.prefill = None
            elif request.move is not None and drained:
                self._machine.hand_over(request, now)
            else:
                actions += self._machine.retry(request, reason, now, counts=False)
        return actions

    def _welcome(self, worker_id: WorkerId) -> Action:
        limits = self._limits
        welcome = Welcome(
            coordinator=self._incarnation, heartbeat_s=limits.heartbeat_s, others=limits.siblings
        )
        return Send(worker_id, welcome)
