"""Running a quantised model beside transformers' of its dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.batches import HandSequence, hidden_states, make_batch
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.greedy import greedy_tokens
from transformers import PreTrainedModel

from splitserve.engine.step.model_runner import ModelRunner

BLOCK_SIZE, PROMPT_LEN, NUM_TOKENS = 8, 45, 16


def make_runner(folder: Path, dtype: str = "float32", **options: Any) -> ModelRunner:
    config = engine_config(folder, "cpu", dtype, BLOCK_SIZE, 96, **options)
    runner = ModelRunner(config)
    runner.kv_cache.pool.fill_(torch.nan)
    return runner


def random_tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, count)]


def blocks(num_tokens: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).permutation(96)[: -(-num_tokens // BLOCK_SIZE)]]


def all_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    sequence = HandSequence(prompt, blocks(len(prompt), seed=1))
    with torch.inference_mode():
        return runner._model.logits(hidden_states(runner, make_batch([(sequence, len(prompt))], BLOCK_SIZE)))


def run(runner: ModelRunner, sequence: HandSequence, count: int) -> None:
    token = int(runner.execute(make_batch([(sequence, count)], BLOCK_SIZE)).token_ids[0])
    sequence.num_computed += count
    if token >= 0:
        sequence.output.append(token)


def answer(
    runner: ModelRunner, prompt: list[int], chunk: int, seed: int, num_tokens: int = NUM_TOKENS
) -> list[int]:
    """Greedy, the prompt in chunks, its blocks moved elsewhere after it."""
    here = HandSequence(prompt, blocks(len(prompt), seed))
    while here.num_computed < len(prompt):
        run(runner, here, min(chunk, len(prompt) - here.num_computed))
    moved = runner.kv_cache.block_bytes_view[here.blocks].copy()
    runner.kv_cache.pool.fill_(torch.nan)
    there = HandSequence(
        prompt, blocks(len(prompt) + num_tokens, seed + 1), num_computed=len(prompt), output=list(here.output)
    )
    runner.kv_cache.block_bytes_view[there.blocks[: len(here.blocks)]] = moved
    while len(there.output) < num_tokens:
        run(runner, there, 1)
    return there.output


def assert_exact(folder: Path, dtype: str, **options: Any) -> None:
    """The same bits in one pass, in chunks, in steps and with two threads."""
    runner = make_runner(folder, dtype, exact=True, **options)
    prompt = random_tokens(PROMPT_LEN, seed=7)
    whole = all_logits(runner, prompt)
    for index in (1, 9, 30):
        assert torch.equal(all_logits(runner, prompt[:index]), whole[:index])
    tokens = answer(runner, prompt, 64, seed=8)
    assert answer(runner, prompt, 7, seed=11) == tokens
    two = make_runner(folder, dtype, exact=True, threads=2, **options)
    assert torch.equal(all_logits(two, prompt), whole)
    assert answer(two, prompt, 19, seed=13) == tokens


@torch.inference_mode()
def assert_same_function(runner: ModelRunner, reference: PreTrainedModel, most: float = 5e-4) -> None:
    """Compare logits in one pass, to ``most``, and if that is small greedy tokens in chunks and steps.
    ``reference``: dequantised, float32."""
    prompt = random_tokens(PROMPT_LEN, seed=3)
    expected = reference(torch.tensor([prompt])).logits[0].float()
    error = (all_logits(runner, prompt) - expected).abs().max() / expected.abs().max()
    assert error < most
    if most > 1e-2:
        return
    found = answer(runner, prompt, 17, seed=5)
    assert found == greedy_tokens(reference, prompt, found, NUM_TOKENS)
