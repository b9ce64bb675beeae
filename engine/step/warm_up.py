"""The first steps of a model, before anybody waits for them: what a first use compiles, tunes or allocates is
then there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...transport.messages.messages import SamplingParams
from ..errors import OutOfMemoryError, is_out_of_memory
from .batch import Batch, BatchStates, SamplingState, StepOutput

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
MANY_SEQS = 65
"""A step of more than 64 sequences takes kernels of another size, one of more than 1,024 of a third."""
LARGE_SEQS = 1025
EVERYTHING = SamplingParams(
    max_tokens=1, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=1
)
WAYS_TO_SAMPLE = (
    EVERYTHING,
    SamplingParams(max_tokens=1, top_k=9),
    SamplingParams(max_tokens=1, logit_bias={0: 1.0}),
)
"""On a GPU each option, and edits without filters and filters without edits, are compiled when first used."""


class _AllowsAll:
    """A matcher for the step with ``EVERYTHING``, so that the kernel for masks is compiled."""

    def failure(self, num_outputs: int) -> str:
        return ""

    def mask(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        return np.array([-1], np.int32)  # of each word


def run_first_steps(
    execute: Callable[[Batch], StepOutput],
    lengths: Sequence[int],
    block_size: int,
    num_seqs: Sequence[int] = (),
    state_blocks: int = 0,
    drafts: bool = False,
) -> None:
    """Prompts of these lengths, the shortest first, decode steps, and mixed steps of ``num_seqs`` sequences,
    all in the pool's first blocks. ``state_blocks``: of each sequence's state; ``drafts``: the model drafts.
    Raises OutOfMemoryError."""
    shortest = min(lengths)
    steps = [_in_first_blocks(0, length, block_size, GREEDY) for length in sorted(set(lengths))]
    steps += (_in_first_blocks(shortest, shortest + 1, block_size, params) for params in WAYS_TO_SAMPLE)
    steps += map(_mixed, num_seqs)
    for batch in steps:
        if drafts:
            batch = replace(batch, num_drafts=np.ones(batch.num_seqs, np.int32))
        if state_blocks:
            batch = replace(batch, states=states_behind(batch, state_blocks))
        try:
            execute(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"beside the weights and the KV cache no memory is left for a step of {batch.num_tokens} "
                f"tokens ({error}); lower --kv-cache-gib, --num-blocks or --gpu-memory-utilization, or of a "
                "prefill worker --max-batch-tokens (`splitserve up`: --prefill-max-batch-tokens)"
            ) from error


def many_seqs(most: int) -> list[int]:
    """A number of sequences for each size of kernels that steps of 65 to ``most`` sequences take: their
    ``padded_seqs``."""
    sizes, size = [MANY_SEQS], LARGE_SEQS
    while size <= most:
        sizes.append(size)
        size = 2 * size - 1
    return sizes


def states_behind(batch: Batch, count: int, shared: bool = True) -> BatchStates:
    """States of ``count`` blocks in the pool's blocks behind those of the batch's tokens. ``shared``: of all
    sequences in the same ones."""
    num_seqs, first = batch.num_seqs, int(batch.block_tables.max()) + 1
    at = np.zeros(num_seqs, np.int32) if shared else 2 * count * np.arange(num_seqs, dtype=np.int32)
    copies = at[:, None] + np.arange(first, first + 2 * count, dtype=np.int32)
    begins = batch.positions[batch.query_start_loc[:-1]] == 0
    return BatchStates(
        np.concatenate([copies, copies[:, :count]], axis=1).reshape(num_seqs, 3, count),
        np.where(begins, -1, 0).astype(np.int32),
        np.zeros(num_seqs, np.int32),
    )


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
        sampling=[SamplingState(params, [0] * stop, [], _AllowsAll() if params is EVERYTHING else None)],
    )


def _mixed(num_seqs: int) -> Batch:
    """A chunk of two tokens, then one token of each other sequence, all in the first block."""
    positions = np.array([0, 1, *[0] * (num_seqs - 1)], np.int32)
    return Batch(
        token_ids=np.zeros(num_seqs + 1, np.int32),
        positions=positions,
        query_start_loc=np.array([0, *range(2, num_seqs + 2)], np.int32),
        seq_lens=np.array([2, *[1] * (num_seqs - 1)], np.int32),
        block_tables=np.zeros((num_seqs, 1), np.int32),
        slot_mapping=positions.astype(np.int64),
        sampling=[SamplingState(GREEDY, [0] * 2, []) for _ in range(num_seqs)],
    )
