"""A simulated prefill worker: the real core, a device in place of the model."""

from __future__ import annotations

from typing import Any

from ...engine.cache.block_manager import BlockManager
from ...engine.step.batch import StepOutput
from ...prefill.core import PrefillCore
from ...prefill.scheduler import PrefillScheduler, PrefillStep
from ...transport.handoff import protocol as act
from ...transport.handoff.layer_slicing import LayerSlicing
from ...transport.handoff.sender import HandoffSender
from ...transport.messages.messages import Grant, Message, PeerId
from ...worker.roles import Departure, RoleHost
from .cluster import Pool
from .device import Device
from .leaving_layers import LeavingLayers
from .worker_shell import Surroundings, WorkerShell

MOST_PROMPTS = 64
"""In one step: the prefill workers' default."""


class PrefillShell(WorkerShell):
    """While a step runs, its layers become final one after the other and leave as the core wants them: there
    is an event where some leave, and none for the others."""

    role = "prefill"
    core: PrefillCore

    def __init__(
        self, simulation: Surroundings, name: str, pool: Pool, device: Device, host: RoleHost | None
    ) -> None:
        super().__init__(simulation, name, pool, device, host)
        memory = pool.profile.memory
        scheduler = PrefillScheduler(
            host.blocks if host else BlockManager(pool.blocks),
            memory.block_size,
            self.model.fingerprint,
            pool.max_batch_tokens,
            MOST_PROMPTS,
            for_decode=host.for_decode if host and host.mixed else None,
        )
        slicing = LayerSlicing(memory.num_layers, memory.block_bytes)
        is_local = host.hands_to_itself if host else lambda _: False
        self.core = PrefillCore(
            self.meet(), scheduler, frozenset(), memory.max_model_len, slicing=slicing, is_local=is_local
        )
        self.departure = Departure(self.core, "prefill", host)
        device.prefill = self
        self._leaving: LeavingLayers | None = None  # of the running step

    @property
    def sender(self) -> HandoffSender:
        return self.core.sender

    def from_coordinator(self, message: Message) -> None:
        self.core.from_coordinator(message, self.queue.now)

    def take(self) -> list[Any]:
        return self.core.take()

    def do(self, action: Any) -> None:
        """A decode worker whose name has gone to its successor is spoken to in vain."""
        if type(action) is not act.ToPeer:
            raise TypeError(f"the simulator does not know the action {action}")

    def schedule(self, now: float, num_decode_rows: int) -> PrefillStep | None:
        return self.core.schedule(now, num_decode_rows)

    def begin(self, step: PrefillStep, loop_s: float, seconds: float) -> None:
        """The device runs this step from ``loop_s`` from now on, for ``seconds``."""
        if stride := self.core.feed.layer_stride(step):
            self._leaving = LeavingLayers(
                step, self.queue.now, loop_s, seconds, stride, self.pool.profile.memory.num_layers
            )
            self._await_next_slice(self._leaving, 0)

    def moved(self, ends_at: float) -> None:
        """The running step ends then: its layers become final sooner or later."""
        before = self._leaving
        self._leaving = leaving = before.ending_at(ends_at, self.queue.now) if before is not None else None
        if leaving is not None and leaving is not before and 0 < leaving.awaited < leaving.num_layers:
            self.queue.at(leaving.time_of(leaving.awaited), self._layers_done, leaving, leaving.awaited)

    def complete(self, step: PrefillStep, output: StepOutput) -> None:
        self._leaving = None
        if self.alive:
            self.core.complete(step, output, self.queue.now)

    def hear_answer(self, me: PeerId, peer: PeerId, message: Message) -> None:
        """A grant finds the layers that are final by now, and changes nothing for the steps."""
        if type(message) is not Grant:
            super().hear_answer(me, peer, message)
        elif self.alive and me == self.id:
            self.device.rouse()
            leaving, num_layers = self._leaving, 0
            if leaving is not None:
                num_layers = leaving.num_done(self.queue.now)
                self.core.feed.layers_done(leaving.step, num_layers)
            self.core.from_peer(peer, message, self.queue.now)
            self.carry_out_all()
            if leaving is not None:
                self._await_next_slice(leaving, num_layers)

    def _await_next_slice(self, leaving: LeavingLayers, num_seen: int) -> None:
        """The next look at the running step's layers, after the one at ``num_seen``, is when some of them
        leave, as things are now."""
        wanted = self.core.feed.next_slice(leaving.step) if self.device.jumps else 0
        if wanted is not None and (num_layers := leaving.await_layers(wanted, num_seen)):
            self.queue.at(leaving.time_of(num_layers), self._layers_done, leaving, num_layers)

    def _layers_done(self, leaving: LeavingLayers, num_layers: int) -> None:
        if self.alive and self._leaving is leaving and leaving.awaited == num_layers:
            self.core.feed.layers_done(leaving.step, num_layers)
            self.carry_out_all()
            self._await_next_slice(leaving, num_layers)
