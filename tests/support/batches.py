"""Drives a ModelRunner by hand: a tiny stand-in for a scheduler, with block tables chosen by the test."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.engine.step.batch import Batch, SamplingState, adapters_of
from splitserve.engine.step.constraint import TokenMatcher
from splitserve.engine.step.metadata import attention_metadata, metadata_arrays
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.transport.messages.messages import SamplingParams


class AfterLast:
    """A matcher that allows three tokens, which follow from the output; it notes the outputs that it saw."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.seen: list[list[int]] = []

    def failure(self, num_outputs: int) -> str:
        return ""

    def mask(self, output_token_ids: Seq[int]) -> NDArray[np.int32]:
        self.seen.append(list(output_token_ids))
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        first = sum(output_token_ids) * 7 + len(output_token_ids)
        bits[[(first + i) % self._vocab_size for i in (0, 11, 23)]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass
class HandSequence:
    """A sequence whose first ``num_computed`` tokens are in the cache, in ``blocks``."""

    prompt: list[int]
    blocks: list[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=64, temperature=0.0))
    num_computed: int = 0
    output: list[int] = field(default_factory=list)
    matcher: TokenMatcher | None = None
    adapter: str = ""
    rope_shift: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output


def make_batch(
    steps: Seq[tuple[HandSequence, int]], block_size: int, prompt_logprobs: int | None = None
) -> Batch:
    """One step that runs the next ``n`` tokens of each sequence; those that reach their last token are
    sampled."""
    chunks = [s.token_ids[s.num_computed : s.num_computed + n] for s, n in steps]
    positions = [np.arange(s.num_computed, s.num_computed + n, dtype=np.int32) for s, n in steps]
    tables = np.full(
        (len(steps), max(len(s.blocks) for s, _ in steps)), -(1 << 30), np.int32
    )  # nonsense beyond the end
    for row, (s, n) in enumerate(steps):
        used = -(-(s.num_computed + n) // block_size)
        tables[row, :used] = s.blocks[:used]
    slots = [
        tables[row, p // block_size].astype(np.int64) * block_size + p % block_size
        for row, p in enumerate(positions)
    ]
    shifts = np.repeat([s.rope_shift for s, _ in steps], [n for _, n in steps]).astype(np.int32)
    done = [s.num_computed + n == len(s.token_ids) for s, n in steps]
    next_ids = [s.prompt[s.num_computed + 1 : s.num_computed + n + 1] for s, n in steps]
    return Batch(
        token_ids=np.array([t for chunk in chunks for t in chunk], np.int32),
        positions=np.concatenate(positions),
        query_start_loc=np.cumsum([0, *(n for _, n in steps)]).astype(np.int32),
        seq_lens=np.array([s.num_computed + n for s, n in steps], np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate(slots),
        sampling=[
            SamplingState(s.params, s.prompt, s.output, s.matcher) if ends else None
            for (s, _), ends in zip(steps, done, strict=True)
        ],
        prompt_logprobs=[prompt_logprobs] * len(steps) if prompt_logprobs is not None else (),
        next_prompt_ids=next_ids if prompt_logprobs is not None else (),
        adapters=adapters_of([s.adapter for s, _ in steps]),
        rope=np.maximum(np.concatenate(positions) + shifts, 0) if shifts.any() else None,
    )


def hidden_states(
    runner: ModelRunner, batch: Batch, on_layer: Callable[[int], None] | None = None
) -> torch.Tensor:
    """Return the hidden states of all the batch's tokens [num_tokens, hidden_size], after the last layer."""
    arrays = metadata_arrays(batch) | {"token_ids": batch.token_ids}
    sent = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return runner._model.forward(
        sent["token_ids"], attention_metadata(batch, sent), runner.kv_cache.pool, None, on_layer
    )
