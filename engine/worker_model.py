"""A model ready to serve in a worker: the runner, and its identity for other workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..transport.messages.messages import ModelIdentity
from .step.grammar import GrammarCompiler
from .step.step_thread import Launch, Runner

if TYPE_CHECKING:
    from .adapters.resident import ResidentAdapters
    from .cache.device_blocks import DeviceBlocks
    from .cache.sharded_blocks import ShardedBlocks

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """What a worker's loop needs of a model."""

    runner: Runner
    pool: NDArray[np.uint8] | DeviceBlocks | ShardedBlocks  # [num_blocks, num_layers, layer_bytes]
    identity: ModelIdentity
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    device: torch.device = CPU
    grammars: GrammarCompiler | None = None  # None: it serves no structured output
    ahead_at_layer: int | None = None  # of decode steps: see ``StepThread``
    adapters: ResidentAdapters | None = None
    takes_images: bool = False  # in prompts
    launch: Launch | None = None  # set where steps run on a GPU
    start_phases: Mapping[str, float] = field(default_factory=dict)  # seconds of its start, by name

    @property
    def num_blocks(self) -> int:
        return int(self.pool.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.pool.shape[1])
