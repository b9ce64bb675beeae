"""A coordinator's process; there may be several, none of which knows of the others' requests."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from simulation.borrowing import watch_borrowing
from simulation.coordinator_environment import (
    HOST,
    LATE_TURN_S,
    READ_S,
    Defect,
    SendCheck,
    VirtualControlSocket,
    VirtualProcesses,
    VirtualTimers,
)
from simulation.process import Process
from simulation.worker_process import HEARTBEAT_S

from splitserve.coordinator.dispatcher import LifecycleDispatcher
from splitserve.coordinator.lifecycle.actions import Action
from splitserve.coordinator.lifecycle.lifecycle import Lifecycle, LifecycleLimits
from splitserve.coordinator.lifecycle.worker import WorkerId
from splitserve.transport.channels.event_loop import BUDGET
from splitserve.transport.messages.messages import Message, Role

if TYPE_CHECKING:
    from simulation.world import World

TICK_S = 0.1
PRODUCT_LIMITS = LifecycleLimits()
LIMITS = LifecycleLimits(
    max_queue=10**6,
    max_attempts=40,
    max_deaths=40,
    dead_after_s=0.75,
    progress_timeout_s=2.0,
    heartbeat_s=HEARTBEAT_S,
    lost_after_s=0.5,
    unserved_s=30.0,
    starving_s=1.0,
)


class CoordinatorProcess(Process):
    """The live lifecycle and dispatcher; ``world.clients`` are its sinks."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        siblings = tuple(other for other in world.coordinator_names if other != name)
        limits = PRODUCT_LIMITS if world.scenario.product_limits else LIMITS
        limits = replace(limits, siblings=siblings, min_pull_tokens=1)
        self.number = world.next_number()  # of this process, among those of its name
        self.build = world.builds.drawn(name, self.number)
        self.core = Lifecycle(world.hosts[HOST].incarnations()(), world.scenario.cluster.policy, limits)
        # Half of them see that a worker's connection is gone, as with ZeroMQ; the others go by its silence.
        random, kills = Random(f"{world.seed} {name} {self.number}"), world.scenario.faults.kill_every > 0
        self.control = VirtualControlSocket(self, sees_connections=kills and random.random() < 0.5)
        world.listeners[name] = self.control
        self.processes = VirtualProcesses(self, random)
        self.timers = VirtualTimers(self)
        self._is_reading, self._num_ticks, self.ticked_at = False, 0, self.now
        self.sends = SendCheck(self)
        self._receive, self._tick, self._process_ended = (
            self.core.receive,
            self.core.tick,
            self.core.process_ended,
        )
        self.core.receive = self._watch_receive  # type: ignore[method-assign]
        self.core.tick = self._watch_tick  # type: ignore[method-assign]
        self.core.process_ended = self._watch_process_ended  # type: ignore[method-assign]
        watch_borrowing(self)
        self.dispatcher = LifecycleDispatcher(
            self.core, self.timers, self.control, self.processes, tick_s=TICK_S
        )
        self.timers.call_soon(self.dispatcher.start)

    def flip(self, process: str, role: Role, timeout_s: float | None) -> None:
        self.world.counts["flips ordered"] += isinstance(self.dispatcher.flip(process, role, timeout_s), dict)

    def process_ended(self, pid: int) -> None:
        """Notice that a worker's process has ended."""
        self.control.connection_lost()
        self.processes.ended(pid)

    def poll(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            late = self.world.strikes(self.world.scenario.faults.late_turn, "late turns of a coordinator")
            self.after((LATE_TURN_S if late else READ_S) * self.world.random.random() ** 2, self._read)

    def maybe_defect(self) -> None:
        """Raise Defect with the scenario's probability."""
        if self.world.strikes(self.world.scenario.faults.defect, "defects"):
            raise Defect

    def _read(self) -> None:
        self._is_reading = False
        self.timers.call_now(self._receive_all)

    def _receive_all(self) -> None:
        messages = self.control.receive(BUDGET)
        if self.control.inbox:
            self.poll()
        self.dispatcher.receive(messages)

    # --- between the dispatcher and the lifecycle ------------------------------------------------

    def _watch_receive(self, worker: WorkerId, message: Message, now: float) -> list[Action]:
        self.maybe_defect()
        return self._receive(worker, message, now)

    def _watch_tick(self, now: float) -> list[Action]:
        if self.control.inbox:
            self.world.violated(f"{self.name}: ticks, and has messages that it has not read")
        self.maybe_defect()
        self._num_ticks += 1
        self.ticked_at = now
        if self._num_ticks % 4 == 0:
            self.after(1e-6, self.world.checks.look_at_coordinator, self)
        return self._tick(now)

    def _watch_process_ended(self, worker: WorkerId, now: float) -> list[Action]:
        self.processes.ending.pop(worker, None)
        if worker in self.core.pools.workers and (unread := self.control.unread(worker)):
            self.world.violated(f"{self.name}: removes {worker[0]} before {unread}")
        return self._process_ended(worker, now)
