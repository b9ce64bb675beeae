"""The first steps of a model, before anybody waits for them: what a first use compiles, tunes or allocates is
then there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...transport.messages.messages import SamplingParams
from ..errors import OutOfMemoryError, is_out_of_memory
from .batch import Batch, SamplingState, StepOutput

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
EVERYTHING = SamplingParams(
    max_tokens=1, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=1
)
"""On a GPU each option is compiled when it is first used."""


def run_first_steps(execute: Callable[[Batch], StepOutput], lengths: Sequence[int], block_size: int) -> None:
    """Prompts of these lengths, the shortest first, and a decode step, in the pool's first blocks. Raises
    OutOfMemoryError."""
    shortest = min(lengths)
    steps = [(0, length, GREEDY) for length in sorted(set(lengths))]
    for start, stop, params in (*steps, (shortest, shortest + 1, EVERYTHING)):
        try:
            execute(_in_first_blocks(start, stop, block_size, params))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"beside the weights and the KV cache no memory is left for a step of {stop - start} tokens "
                f"({error}); lower --kv-cache-gib, --num-blocks or --prefill-max-batch-tokens"
            ) from error


def _in_first_blocks(start: int, stop: int, block_size: int, params: SamplingParams) -> Batch:
    """The tokens from ``start`` to ``stop`` of one sequence."""
    positions = np.arange(start, stop, dtype=np.int32)
    return Batch(
        token_ids=np.zeros(stop - start, np.int32),
        positions=positions,
        query_start_loc=np.array([0, stop - start], np.int32),
        seq_lens=np.array([stop], np.int32),
        block_tables=np.arange(-(-stop // block_size), dtype=np.int32)[None],
        slot_mapping=positions.astype(np.int64),
        sampling=[SamplingState(params, [0] * stop, [])],
    )
