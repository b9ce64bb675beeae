"""The simulated coordinator: the real lifecycle; what it says to clients goes to the records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ...coordinator.lifecycle.actions import Action, End, Push, Send
from ...coordinator.lifecycle.lifecycle import Lifecycle
from ...coordinator.lifecycle.limits import LifecycleLimits
from ...coordinator.lifecycle.request import Request
from ...coordinator.lifecycle.snapshot import finished, snapshot_of
from ...steering.steering import Steering
from ...transport.messages.messages import Alive, Message, PeerId
from .cluster import Cluster
from .events import EventQueue
from .records import RequestRecord
from .worker_shell import WorkerShell

TICK_S = 0.1


class Surroundings(Protocol):
    """What the coordinator sees of the simulation."""

    cluster: Cluster
    queue: EventQueue

    @property
    def workers(self) -> Mapping[str, WorkerShell]:
        """Those that are alive, by name."""

    def next_number(self) -> int:
        """For an incarnation."""

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""


class CoordinatorShell:
    """Carries out what the lifecycle wants, and sees when each request gets its tokens."""

    def __init__(self, simulation: Surroundings, steering: Steering | None = None) -> None:
        cluster = simulation.cluster
        limits = LifecycleLimits(max_queue=cluster.max_queue)
        self.core = Lifecycle(simulation.next_number(), cluster.routing, limits)
        self._simulation, self._queue = simulation, simulation.queue
        self.open: dict[str, RequestRecord] = {}
        self._without_token: dict[str, RequestRecord] = {}
        self._steering = steering
        self._tick()
        if steering is not None:
            self._steer(steering)

    def submit(self, request: Request, record: RequestRecord) -> None:
        self.open[request.request_id] = self._without_token[request.request_id] = record
        self._carry_out(self.core.submit(request, self._queue.now))

    def hear(self, worker: PeerId, message: Message) -> None:
        self._carry_out(self.core.receive(worker, message, self._queue.now))

    def worker_ended(self, worker: PeerId) -> None:
        """Its process is seen to have ended."""
        self._carry_out(self.core.process_ended(worker, self._queue.now))

    def _tick(self) -> None:
        self._queue.after(TICK_S, self._tick)
        self._hear_of_resting()
        self._carry_out(self.core.tick(self._queue.now))

    def _hear_of_resting(self) -> None:
        """What they would say at each heartbeat is known: that they live, and hold nothing."""
        known, now = self.core.pools.workers, self._queue.now
        for shell in self._simulation.workers.values():
            if shell.rests and (worker := known.get(shell.id)) is not None:
                worker.last_seen = worker.progressed = worker.held_at = now

    def _steer(self, steering: Steering) -> None:
        now = self._queue.now
        self._queue.after(steering.options.every_s, self._steer, steering)
        for decision in steering.look(snapshot_of(self.core), now):
            if steering.options.mode == "act" and decision.kind == "flip" and decision.role != "mixed":
                self._carry_out(self.core.flip(decision.worker, decision.role, None, now)[1])

    def _carry_out(self, actions: list[Action]) -> None:
        now, opened, waiting = self._queue.now, self.open, self._without_token
        for action in actions:
            if type(action) is Push:
                if (record := waiting.pop(action.request.request_id, None)) is not None:
                    record.first_at = now
            elif type(action) is Send:
                self._send(action)
            elif type(action) is End:
                record = opened.pop(action.request.request_id)
                waiting.pop(action.request.request_id, None)
                if (
                    self._steering is not None
                    and (over := finished(action.request, action.ended)) is not None
                ):
                    self._steering.note(over, now)
                record.close(action.ended, now)
                self._simulation.ended(record)

    def _send(self, send: Send) -> None:
        """No worker here gives its coordinator up, so that its heartbeat need not reach them."""
        if type(send.message) is Alive:
            return
        worker = self._simulation.workers.get(send.worker[0])
        if worker is not None:
            self._queue.after(worker.message_s, worker.hear, send.worker, send.message)
