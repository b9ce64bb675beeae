"""A model ready to serve in a worker: the runner, and its identity for other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from .cache.host_mirror import HostMirror
from .step.grammar import GrammarCompiler
from .step.step_thread import Launch, Runner

if TYPE_CHECKING:
    from .cache.device_blocks import DeviceBlocks

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """What a worker's loop needs of a model. ``identity`` has the fields of
    ``transport.messages.ModelIdentity``."""

    runner: Runner
    pool: NDArray[np.uint8]  # [num_blocks, num_layers, layer_bytes], what the movers read and write
    identity: dict[str, str | int]
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    device: torch.device = CPU
    mirror: HostMirror | None = None  # set where the cache itself lies on a GPU
    device_blocks: DeviceBlocks | None = None  # likewise
    grammars: GrammarCompiler | None = None  # None: it serves no structured output
    ahead_at_layer: int | None = None  # of decode steps: see ``StepThread``
    launch: Launch | None = None  # likewise: set where steps run on a GPU
    start_phases: Mapping[str, float] = field(default_factory=dict)  # seconds of its start, by name

    @property
    def num_layers(self) -> int:
        return int(self.pool.shape[1])

    def fetch(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int | None = None) -> None:
        """Brings blocks (or ``num_layers`` of their layers) into ``pool`` before they are sent."""
        if self.mirror is not None:
            self.mirror.fetch(blocks, first_layer, num_layers)

    def store(self, blocks: Sequence[int]) -> None:
        """Brings blocks that have arrived in ``pool`` into the cache."""
        if self.mirror is not None:
            self.mirror.store(blocks)
