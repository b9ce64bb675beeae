"""The simulated coordinator: the live lifecycle and dispatcher in virtual time, and the records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ...coordinator.dispatcher import ClosedSink, LifecycleDispatcher
from ...coordinator.lifecycle.lifecycle import Lifecycle
from ...coordinator.lifecycle.limits import LifecycleLimits
from ...coordinator.lifecycle.request import Ended, Request
from ...coordinator.lifecycle.snapshot import finished, snapshot_of
from ...coordinator.lifecycle.worker import WorkerId
from ...steering.steering import Steering
from ...transport.environment import Timer
from ...transport.messages.messages import Alive, Flip, Hello, Message
from .channels import Fabric
from .cluster import Cluster
from .events import EventQueue
from .process import SimulatedRole
from .prompts import NO_SINK
from .records import RequestRecord

TICK_S = 0.1
_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)  # simulated workers come and go


class Surroundings(Protocol):
    """What the coordinator sees of the simulation."""

    cluster: Cluster
    queue: EventQueue

    fabric: Fabric
    workers: dict[str, SimulatedRole]

    def next_number(self) -> int:
        """For an incarnation."""

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""


class FirstTokenSink(ClosedSink):
    """Writes down when the first token came; later ones go to NO_SINK, which is quicker."""

    def __init__(self, queue: EventQueue, request: Request, record: RequestRecord) -> None:
        self._queue, self._request, self._record = queue, request, record

    def push(self, token_id: int, logprobs: object) -> None:
        self._record.first_at = self._queue.now
        self._request.sink = NO_SINK


class Coordinator:
    """A dispatcher, and its timers, control socket and watch on processes."""

    def __init__(self, simulation: Surroundings, steering: Steering | None = None) -> None:
        cluster = simulation.cluster
        limits = LifecycleLimits(max_queue=cluster.max_queue)
        self.core = Lifecycle(simulation.next_number(), cluster.routing, limits)
        self._simulation, self._queue, self._steering = simulation, simulation.queue, steering
        self.open: dict[str, RequestRecord] = {}
        simulation.fabric.coordinator = self
        self._dispatcher = LifecycleDispatcher(self.core, self, self, self, tick_s=TICK_S, log=_log)
        self._dispatcher.listeners.add("records", partial(self.call_soon, self._over))
        self._dispatcher.start()
        if steering is not None:
            self._steer(steering)

    def submit(self, request: Request, record: RequestRecord) -> None:
        self.open[request.request_id] = record
        request.sink = FirstTokenSink(self._queue, request, record)
        self._dispatcher.submit(request)

    def receive_from(self, identity: bytes, messages: Sequence[Message]) -> None:
        """Receive messages that a worker has sent together."""
        self._dispatcher.receive([(identity, message) for message in messages])

    def worker_ended(self, worker: WorkerId) -> None:
        """Its process is seen to have ended."""
        self._dispatcher.process_ended(worker)

    def _over(self, request: Request, ended: Ended) -> None:
        record = self.open.pop(request.request_id)
        if self._steering is not None and (seen := finished(request, ended)) is not None:
            self._steering.note(seen, self._queue.now)
        record.close(ended, self._queue.now)
        self._simulation.ended(record)

    def _steer(self, steering: Steering) -> None:
        now = self._queue.now
        self._queue.after(steering.options.every_s, self._steer, steering)
        for decision in steering.look(snapshot_of(self.core), now):
            if steering.options.mode == "act" and decision.kind == "flip" and decision.role != "mixed":
                self._dispatcher.flip(decision.worker, decision.role, None)
        self._dispatcher.lend_decode(steering.options.mode != "act" or steering.controller.lends_decode)

    # --- what the dispatcher calls ---------------------------------------------------------------

    def now(self) -> float:
        return self._queue.now

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self._queue.after(0.0, callback, *args)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> Timer:
        self._queue.after(delay_s, callback, *args)
        return self

    def cancel(self) -> None:
        """Cancel a timer: not called, for the simulated coordinator never stops."""

    def reach(self, peer: bytes, *messages: Message) -> bool:
        """No worker here gives its coordinator up, so that the coordinator's heartbeat need not reach it. A
        worker that is to change its role learns of it when it has: the live one pauses meanwhile."""
        channel = self._simulation.fabric.channels.get(peer)
        messages = tuple(message for message in messages if type(message) is not Alive)
        if channel is not None and messages:
            pool, flips = channel.process.pool, any(type(message) is Flip for message in messages)
            flip_s = pool.profile.flip_s if flips else None
            self._queue.after(channel.process.message_s + (flip_s or 0.0), channel.deliver, messages)
        return True

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        """What resting workers would report at each heartbeat is known: that they live, and hold nothing."""
        known, now = self.core.pools.workers, self._queue.now
        for role in self._simulation.workers.values():
            if role.process.rests and (worker := known.get(role.id)) is not None:
                worker.last_seen = worker.progressed = worker.held_at = now
        return []

    def lost_any(self) -> bool:
        return False

    def watch(self, hello: Hello) -> None:
        """The simulation calls ``worker_ended`` of all."""

    def forget(self, worker: WorkerId) -> None: ...
