"""Sequences of models with recurrent layers, driven by hand: their states' blocks are chosen by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from splitserve.engine.step.metadata import attention_metadata, metadata_arrays
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.state_shape import NO_STATE
from splitserve.kernels.states import StateInputs

from .batches import HandSequence, make_batch
from .engines import engine_config
from .families import VOCAB_SIZE

BLOCK_SIZE = 16
NUM_BLOCKS = 160
NUM_TOKENS = 24


@dataclass
class HybridSequence(HandSequence):
    """``states``: blocks of both copies and of the snapshot, one after another; ``source``: the copy that has
    the state; ``mark``: see ``StateInputs``, of the next step."""

    states: list[int] = field(default_factory=list)
    source: int = NO_STATE
    mark: int = 0

    @property
    def snapshot(self) -> list[int]:
        return self.states[2 * len(self.states) // 3 :]


def make_runner(folder: Path, **settings: Any) -> ModelRunner:
    """With a poisoned pool: what reads a slot that was never written yields NaN."""
    asked = {
        "device": "cpu",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        **settings,
    }
    runner = ModelRunner(engine_config(folder, **asked))
    runner.kv_cache.pool.fill_(torch.nan)
    return runner


def random_tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, count)]


def sequences(runner: ModelRunner, prompts: list[list[int]], seed: int) -> list[HybridSequence]:
    """With blocks in random order."""
    free = iter(np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist())
    of_states = 3 * num_state_blocks(runner)

    def take(count: int) -> list[int]:
        return [next(free) for _ in range(count)]

    return [
        HybridSequence(prompt, take(-(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE)), states=take(of_states))
        for prompt in prompts
    ]


@torch.inference_mode()
def reference_logits(reference: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0].float()
    return logits


def num_state_blocks(runner: ModelRunner) -> int:
    """Blocks of one copy."""
    layout, states = runner.kv_cache.layout, runner.config.states
    assert states is not None
    return states.num_blocks(layout.block_size, layout.dtype.itemsize)


def state_inputs(steps: Sequence[tuple[HybridSequence, int]]) -> StateInputs:
    return StateInputs(
        query_start_loc=torch.tensor([0, *(n for _, n in steps)], dtype=torch.int32).cumsum(0).int(),
        tables=torch.tensor([s.states for s, _ in steps], dtype=torch.int32).view(len(steps), 3, -1),
        source=torch.tensor([s.source for s, _ in steps], dtype=torch.int32),
        marks=torch.tensor([s.mark for s, _ in steps], dtype=torch.int32),
    )


def step_logits(
    runner: ModelRunner,
    steps: Sequence[tuple[HybridSequence, int]],
    rows: Sequence[int] | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """One step of the model, on all ranks; the logits of these token rows, or of all."""
    batch = make_batch(steps, runner.kv_cache.layout.block_size)
    arrays = metadata_arrays(batch) | {"token_ids": batch.token_ids}
    sent = {name: torch.from_numpy(array) for name, array in arrays.items()}
    metadata, states = attention_metadata(batch, sent), state_inputs(steps)
    index = None if rows is None else torch.tensor(rows)

    def run(one: ModelRunner) -> torch.Tensor:
        with torch.inference_mode():
            reports, adapters = on_layer if one is runner else None, one.loaded.adapters
            slots = None if adapters is None else adapters.slots_of(batch.adapters, batch.query_start_loc)
            own = replace(
                metadata, states=states, adapters=None if slots is None else torch.from_numpy(slots)
            )
            hidden = one._model.forward(sent["token_ids"], own, one.loaded.pool, index, reports)
            return one._model.logits(hidden)

    logits = run(runner) if len(runner.ranks) == 1 else runner._all.run(run, lambda: run(runner))
    for sequence, count in steps:
        sequence.num_computed += count
        sequence.source, sequence.mark = 0 if sequence.source == NO_STATE else 1 - sequence.source, 0
    return logits


def run(runner: ModelRunner, steps: Sequence[tuple[HybridSequence, int]]) -> None:
    """One step; tokens of the sequences that reach their last token are appended to them."""
    ends = torch.tensor([n for _, n in steps]).cumsum(0) - 1
    logits = step_logits(runner, steps, None if all(n == 1 for _, n in steps) else ends.tolist())
    for (sequence, _), token in zip(steps, logits.argmax(-1).tolist(), strict=True):
        if sequence.num_computed == len(sequence.token_ids):
            sequence.output.append(token)


def whole_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    return step_logits(runner, [(sequences(runner, [prompt], seed=1)[0], len(prompt))])
