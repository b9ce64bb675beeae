"""A runner whose steps raise what a test wants, and a step for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from splitserve.engine.step.batch import Batch, StepOutput

EMPTY = Batch(
    token_ids=np.zeros(1, np.int32),
    positions=np.zeros(1, np.int32),
    query_start_loc=np.array([0, 1], np.int32),
    seq_lens=np.ones(1, np.int32),
    block_tables=np.zeros((1, 1), np.int32),
    slot_mapping=np.zeros(1, np.int64),
    sampling=[None],
)


@dataclass
class OneStep:
    batch: Batch


class Failing:
    """Raises what it is given, if anything, while it holds a tensor."""

    def __init__(self) -> None:
        self.fail: Callable[[], object] | None = None
        self.held: weakref.ref[torch.Tensor] | None = None

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        activations = torch.zeros(1000)
        self.held = weakref.ref(activations)
        if self.fail is not None:
            self.fail()
        return StepOutput(batch.token_ids)
