"""A coordinator's process; there may be several, none of which knows of the others' requests."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from simulation.channels import VirtualNetwork
from simulation.process import Process
from simulation.worker_process import HEARTBEAT_S

from splitserve.coordinator.lifecycle.actions import Action, End, Push, PushPromptLogprobs, Send
from splitserve.coordinator.lifecycle.flips import FlipRecord
from splitserve.coordinator.lifecycle.lifecycle import Lifecycle, LifecycleLimits
from splitserve.coordinator.lifecycle.request import Request
from splitserve.transport.channels.coordinator_link import identity_of, worker_of
from splitserve.transport.messages.messages import FROM_WORKER, Message, Prefill, Role

if TYPE_CHECKING:
    from simulation.world import World

TICK_S = 0.1
HOST = "host-0"
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
    """The real lifecycle; what it says to clients goes to ``world.clients``."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        siblings = tuple(other for other in world.coordinator_names if other != name)
        limits = replace(PRODUCT_LIMITS if world.scenario.product_limits else LIMITS, siblings=siblings)
        self.number = world.next_number()  # of this process, among those of its name
        self._listener = VirtualNetwork(self, HOST).listen(name, FROM_WORKER)
        self.core = Lifecycle(world.hosts[HOST].incarnations()(), world.scenario.cluster.policy, limits)
        self._num_ticks = 0
        # Half of them see that a worker's connection is gone, as ZeroMQ tells; the others go by its silence.
        kills = world.scenario.faults.kill_every > 0
        self._sees_connections = kills and Random(f"{world.seed} {name} {self.number}").random() < 0.5
        self._tick()

    def submit(self, request: Request) -> None:
        self._carry_out(self.core.submit(request, self.now))

    def cancel(self, request_id: str) -> None:
        self._carry_out(self.core.cancel(request_id, self.now))

    def drain(self, worker_id: str, timeout_s: float | None) -> None:
        self._carry_out(self.core.drain(worker_id, timeout_s)[1])

    def flip(self, process: str, role: Role, timeout_s: float | None) -> None:
        ordered, actions = self.core.flip(process, role, timeout_s, self.now)
        self.world.counts["flips ordered"] += isinstance(ordered, FlipRecord)
        self._carry_out(actions)

    def connection_lost(self) -> None:
        """Some worker's process has ended."""
        if self._sees_connections:
            self.core.connection_lost()

    def poll(self) -> None:
        for identity, message in self._listener.receive(1000):
            if (worker := worker_of(identity)) is not None:
                self._check_owner(message)
                self._carry_out(self.core.receive(worker, message, self.now))

    def _check_owner(self, message: Message) -> None:
        """A request is its coordinator's alone."""
        others = {
            other.core.incarnation for other in self.world.coordinators.values() if other.name != self.name
        }
        if getattr(message, "coordinator", 0) in others:
            self.world.violated(
                f"{self.name}: got a {type(message).__name__} about a request of another coordinator"
            )

    def _tick(self) -> None:
        self.after(TICK_S, self._tick)
        self._carry_out(self.core.tick(self.now))
        self._num_ticks += 1
        if self._num_ticks % 4 == 0:
            self.world.checks.look_at_coordinator(self)

    def _carry_out(self, actions: list[Action]) -> None:
        clients = self.world.clients
        for action in actions:
            if type(action) is Push:
                clients.pushed(action)
            elif type(action) is Send:
                self._send(action)
            elif type(action) is End:
                clients.ended(action, self)
            elif type(action) is PushPromptLogprobs:
                clients.pushed_prompt_logprobs(action)
            else:
                raise TypeError(f"the simulator does not know the action {action}")

    def _send(self, send: Send) -> None:
        if type(send.message) is Prefill:
            self.world.clients.tried(send.message, send.worker)
        sent = self._listener.send(identity_of(*send.worker), send.message)
        if self._sees_connections:
            if not sent and send.worker in self.core.pools.workers:
                self.world.counts["connections found gone"] += 1
            self.core.pools.reached(send.worker, sent, self.now)
