"""Our decoder and transformers' are the same function, for every family and however the tokens reach the
cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.batches import HandSequence, hidden_states, make_batch
from support.engines import engine_config
from support.families import FAMILIES, VOCAB_SIZE
from support.greedy import greedy_tokens
from support.models import make_checkpoint
from transformers import PreTrainedModel

from splitserve.engine.step.model_runner import ModelRunner

BLOCK_SIZE = 16  # the default, for which kernels hold keys in groups; quantised_models.py has another
NUM_BLOCKS = 96
PROMPT_LEN = 75  # longer than the sliding windows, not a multiple of the block size
NUM_STEPS = 64


@dataclass
class Pair:
    reference: PreTrainedModel
    runner: ModelRunner

    @torch.inference_mode()
    def reference_logits(self, token_ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.reference(torch.tensor([token_ids])).logits[0].float()
        return logits

    def is_greedy(self, sequence: HandSequence, num_tokens: int) -> bool:
        expected = greedy_tokens(self.reference, sequence.prompt, sequence.output, num_tokens)
        return sequence.output == expected


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("checkpoint")
    return Pair(make_checkpoint(folder, request.param), make_runner(folder))


def make_runner(folder: Path, dtype: str = "float32") -> ModelRunner:
    """With a poisoned pool: whatever reads a slot that was never written yields NaN."""
    runner = ModelRunner(
        engine_config(folder, device="cpu", dtype=dtype, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    )
    runner.kv_cache.pool.fill_(torch.nan)
    return runner


def random_tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, count)]


def scattered_blocks(num_tokens: int, seed: int) -> list[int]:
    """Enough blocks for ``num_tokens``, in random order."""
    return [
        int(block)
        for block in np.random.default_rng(seed).permutation(NUM_BLOCKS)[: -(-num_tokens // BLOCK_SIZE)]
    ]


def all_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    sequence = HandSequence(prompt, scattered_blocks(len(prompt), seed=1))
    with torch.inference_mode():
        batch = make_batch([(sequence, len(prompt))], BLOCK_SIZE)
        hidden = hidden_states(runner, batch)
        return runner._model.logits(hidden)


def run(runner: ModelRunner, steps: list[tuple[HandSequence, int]]) -> None:
    """One step; sampled tokens are appended to their sequences."""
    token_ids = runner.execute(make_batch(steps, BLOCK_SIZE)).token_ids
    for (sequence, count), token in zip(steps, token_ids, strict=True):
        sequence.num_computed += count
        if token >= 0:
            sequence.output.append(int(token))


def test_float32_logits_agree(
    pair: Pair, request: pytest.FixtureRequest, tried: Callable[[str, str, str], None]
) -> None:
    tried(request.node.callspec.params["pair"], "wide", "float32")
    prompt = random_tokens(PROMPT_LEN, seed=3)
    expected = pair.reference_logits(prompt)
    error = (all_logits(pair.runner, prompt) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(
    family: str, tmp_path: Path, tried: Callable[[str, str, str], None]
) -> None:
    """By the quarter of tokens that differ least: where rounding makes a token choose another expert, it and
    those behind it differ by far more, in both."""
    tried(family, "wide", "bfloat16")
    prompts = [random_tokens(PROMPT_LEN, seed) for seed in (3, 4)]
    exact = make_checkpoint(tmp_path, family, dtype=torch.bfloat16).float()
    reference = Pair(exact, make_runner(tmp_path, "bfloat16"))
    expected = [reference.reference_logits(prompt) for prompt in prompts]
    rounded = Pair(exact.to(torch.bfloat16), reference.runner)
    own, theirs = (
        torch.cat(
            [(of(prompt) - logits).norm(dim=1) for prompt, logits in zip(prompts, expected, strict=True)]
        )
        for of in (partial(all_logits, reference.runner), rounded.reference_logits)
    )
    assert own.quantile(0.25) < 1.5 * theirs.quantile(0.25)


def test_greedy_tokens_agree_for_64_steps_however_the_prompt_was_chunked(pair: Pair) -> None:
    prompt = random_tokens(PROMPT_LEN, seed=5)
    rng = np.random.default_rng(6)
    for blocks_seed in range(2):
        sequence = HandSequence(prompt, scattered_blocks(PROMPT_LEN + NUM_STEPS, blocks_seed))
        while sequence.num_computed < PROMPT_LEN:
            run(pair.runner, [(sequence, int(min(rng.integers(1, 40), PROMPT_LEN - sequence.num_computed)))])
        while len(sequence.output) < NUM_STEPS:
            run(pair.runner, [(sequence, 1)])
        assert pair.is_greedy(sequence, NUM_STEPS)


def test_a_shared_prefix_is_read_from_the_cache(pair: Pair) -> None:
    prefix = random_tokens(5 * BLOCK_SIZE, seed=7)
    first = HandSequence(prefix + random_tokens(9, seed=8), list(range(20)))
    run(pair.runner, [(first, len(first.prompt))])
    second = HandSequence(
        prefix + random_tokens(14, seed=9), [*first.blocks[:5], *range(40, 60)], num_computed=len(prefix)
    )
    run(pair.runner, [(second, 14)])
    while len(second.output) < 16:
        run(pair.runner, [(second, 1)])
    assert pair.is_greedy(second, 16)


def test_prefill_chunks_and_decode_steps_share_a_batch(pair: Pair) -> None:
    lengths = (PROMPT_LEN, 30, 1, 48)
    owned = np.random.default_rng(10).permutation(NUM_BLOCKS).reshape(len(lengths), -1)
    sequences = [
        HandSequence(random_tokens(n, seed=n), [int(b) for b in owned[i]]) for i, n in enumerate(lengths)
    ]
    for step in range(40):
        steps = []
        for i, sequence in enumerate(sequences):
            remaining = len(sequence.token_ids) - sequence.num_computed
            if step >= 2 * i and len(sequence.output) < 16:  # one joins every other step
                steps.append((sequence, min(remaining, 11)))
        if steps:
            run(pair.runner, steps)
    for sequence in sequences:
        assert pair.is_greedy(sequence, 16)


def test_generation_goes_on_from_blocks_copied_to_another_pool(pair: Pair) -> None:
    prompt = random_tokens(PROMPT_LEN, seed=11)
    here = HandSequence(prompt, scattered_blocks(PROMPT_LEN, seed=12))
    run(pair.runner, [(here, PROMPT_LEN)])
    source = pair.runner.kv_cache.block_bytes_view[here.blocks].copy()

    pair.runner.kv_cache.pool.fill_(torch.nan)  # the other worker's pool: same model, other blocks
    there = HandSequence(
        prompt, scattered_blocks(PROMPT_LEN + 16, seed=13), num_computed=PROMPT_LEN, output=list(here.output)
    )
    pair.runner.kv_cache.block_bytes_view[there.blocks[: len(here.blocks)]] = source
    while len(there.output) < 16:
        run(pair.runner, [(there, 1)])
    assert pair.is_greedy(there, 16)


def test_prompt_logprobs_are_those_of_every_position(pair: Pair) -> None:
    prompt = random_tokens(40, seed=14)
    logprobs = pair.reference_logits(prompt).log_softmax(-1)
    sequence = HandSequence(prompt, scattered_blocks(40, seed=15))
    reported = []
    for count in (13, 27):
        output = pair.runner.execute(make_batch([(sequence, count)], BLOCK_SIZE, prompt_logprobs=3))
        reported += output.prompt_logprobs[0]
        sequence.num_computed += count
    assert [len(reported), output.token_ids[0]] == [39, logprobs[-1].argmax()]
    for position, entry in enumerate(reported):
        top = logprobs[position].topk(3)
        assert entry.top_ids == tuple(top.indices.tolist())
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-3)
        assert entry.logprob == pytest.approx(logprobs[position, prompt[position + 1]].item(), abs=1e-3)
