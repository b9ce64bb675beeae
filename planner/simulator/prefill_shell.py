"""A simulated prefill worker: the real core, a device in place of the model."""

from __future__ import annotations

from typing import Any

from ...engine.batch import StepOutput
from ...engine.block_manager import BlockManager
from ...engine.role_host import worker_name
from ...prefill.core import PrefillCore
from ...prefill.scheduler import PrefillScheduler, PrefillStep
from ...transport.handoff_sender import HandoffSender
from ...transport.layer_slicing import LayerSlicing
from ...transport.messages import Message
from .cluster import Pool
from .device import Device
from .worker_shell import Surroundings, WorkerShell

MOST_PROMPTS = 64
"""In one step: the prefill workers' default."""


class PrefillShell(WorkerShell):
    """While a step runs, its layers become final one after the other and leave as the core wants them."""

    role = "prefill"
    core: PrefillCore

    def __init__(self, simulation: Surroundings, name: str, process: str, pool: Pool, device: Device, blocks: BlockManager) -> None:
        super().__init__(simulation, name, process, pool, device, blocks)
        memory = pool.profile.memory
        scheduler = PrefillScheduler(
            blocks,
            memory.block_size,
            self.model.fingerprint,
            pool.max_batch_tokens,
            MOST_PROMPTS,
            for_decode=self._num_growing_blocks if self.mixed else None,
        )
        slicing = LayerSlicing(memory.num_layers, memory.block_bytes)
        self.core = PrefillCore(self.meet(), scheduler, frozenset(), memory.max_model_len, slicing=slicing, is_local=self._is_local)
        device.prefill = self
        self._running: PrefillStep | None = None

    def _is_local(self, decode_worker: str) -> bool:
        return self.mixed and decode_worker == worker_name(self.process, "decode")

    def _num_growing_blocks(self) -> int:
        return self.device.decode.num_growing_blocks if self.device.decode is not None else 0

    @property
    def sender(self) -> HandoffSender:
        return self.core.sender

    def from_coordinator(self, message: Message) -> None:
        self.core.from_coordinator(message, self.queue.now)

    def take(self) -> list[Any]:
        return self.core.take()

    def do(self, action: Any) -> None:
        raise TypeError(f"the simulator does not know the action {action}")

    def schedule(self, now: float) -> PrefillStep | None:
        return self.core.schedule(now)

    def begin(self, step: PrefillStep, loop_s: float, seconds: float) -> None:
        """The device runs this step from ``loop_s`` from now on, for ``seconds``."""
        self._running = step
        if stride := self.core.feed.layer_stride(step):
            num_layers = self.pool.profile.memory.num_layers
            for layers in range(stride, num_layers, stride):
                self.queue.after(loop_s + seconds * layers / num_layers, self._layers_done, step, layers)

    def complete(self, step: PrefillStep, output: StepOutput) -> None:
        self._running = None
        if self.alive:
            self.core.complete(step, output, self.queue.now)

    def _layers_done(self, step: PrefillStep, num_layers: int) -> None:
        if self.alive and self._running is step:
            self.core.feed.layers_done(step, num_layers)
            if self.core.stirs:
                self.carry_out_all()
