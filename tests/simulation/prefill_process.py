"""A prefill worker's process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simulation.model import EOS, NUM_LAYERS
from simulation.worker_process import BLOCK_SIZE, DRAIN_S, MAX_MODEL_LEN, MODEL, TIMES, WorkerProcess

from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.handoff.layer_slicing import LayerSlicing, SlicingMode
from splitserve.transport.handoff.protocol import Key
from splitserve.transport.messages.messages import Message

if TYPE_CHECKING:
    from simulation.flexible_process import FlexibleProcess
    from simulation.world import World

MODES: tuple[SlicingMode, ...] = ("auto", "layers", "blocks")


class PrefillProcess(WorkerProcess):
    """``core`` is the real one. While a step runs its layers are written one by one, and leave if they are
    wanted."""

    role = "prefill"
    base_step_s = 0.008
    core: PrefillCore

    def __init__(
        self, world: World, name: str, host: str, num_blocks: int, process: FlexibleProcess | None = None
    ) -> None:
        super().__init__(world, name, host, num_blocks, process)
        self.start_sending(self.core.sender)
        self._num_layers = 0  # of the running step, written so far

    def make_core(self) -> PrefillCore:
        cluster = self.world.scenario.cluster
        of_both = self.process if self.process is not None and self.process.mixed else None
        scheduler = PrefillScheduler(
            self.blocks,
            BLOCK_SIZE,
            MODEL.fingerprint,
            cluster.max_batch_tokens,
            cluster.max_num_seqs,
            for_decode=of_both.num_growing_blocks if of_both else None,
            window=self.model.window,
        )
        slicing = LayerSlicing(NUM_LAYERS, 1 << 18, self.world.random.choice(MODES))
        is_local = of_both.hands_to_itself if of_both else lambda _: False
        return PrefillCore(self.meet(), scheduler, EOS, MAX_MODEL_LEN, TIMES, DRAIN_S, slicing, is_local)

    def runs_ahead(self) -> bool:
        """As on a GPU; on a CPU a step is made when the one before it has ended."""
        return self.world.random.random() < self.world.scenario.cluster.prefill_ahead

    def take(self) -> list[Any]:
        return self.core.take()

    def from_coordinator(self, message: Message) -> None:
        self.core.from_coordinator(message, self.now)

    def shrink_step(self, step: Any) -> None:
        self.core.shrink_step(step, "the adversary says so")

    def request_ids(self, step: Any) -> Iterable[str]:
        return (chunk.sequence.spec.request_id for chunk in step.chunks)

    def still_held(self, keys: set[Key]) -> Iterable[Key]:
        yield from keys.intersection(self.core.sender.outgoing)
        for key in keys.intersection(self.core.scheduler.held):
            sequence = self.core.scheduler.running.get(key)
            if sequence is None or not (sequence.in_step and sequence.doomed):
                yield key

    def rename_core(self) -> None:
        self.core.rename(self.meet())

    def block_tables(self) -> Iterable[Sequence[int]]:
        return self.core.block_tables()

    def do(self, action: Any) -> None:
        self.sending.carry_out(action)

    # --- layers of a running step ----------------------------------------------------------------

    def begin(self, step: Any, duration: float) -> None:
        self._num_layers = 0
        stride = self.core.feed.layer_stride(step)
        if stride:
            for layer in range(NUM_LAYERS):
                self.after(duration * (layer + 0.9) / NUM_LAYERS, self._layer_done, step, layer, stride)

    def _layer_done(self, step: Any, layer: int, stride: int) -> None:
        if (
            self.steps.running is not step
            or self._num_layers != layer
            or self.hung_until > self.world.queue.now
        ):
            return  # the step has ended, or does not go on
        self.memory.write_layer(step.batch, step.batch.token_ids.tolist(), layer)
        self._num_layers = layer + 1
        if self._num_layers % stride == 0:
            if self.steps.any_ended:
                self.turn()  # the step before it is booked first
            if self.steps.running is step and self.alive:
                self.core.feed.layers_done(step, self._num_layers)
                self.turn()

    def finish(self, step: Any) -> Any:
        return self.memory.execute(step.batch, step.batch.token_ids.tolist(), from_layer=self._num_layers)
