"""Models in which most layers are recurrent are the same function as transformers', however the tokens reach
the cache and wherever its blocks hold states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from support.greedy import greedy_tokens
from support.hybrid_families import HYBRID
from support.models import make_checkpoint
from support.states import (
    BLOCK_SIZE,
    NUM_TOKENS,
    make_runner,
    num_state_blocks,
    random_tokens,
    reference_logits,
    run,
    sequences,
    step_logits,
    whole_logits,
)
from transformers import PreTrainedModel

from splitserve.engine.model.recurrent_config import final_layers
from splitserve.engine.step.model_runner import ModelRunner

PROMPT_LEN = 75
Pair: TypeAlias = tuple[PreTrainedModel, ModelRunner]
Tried: TypeAlias = Callable[[str, str, str], None]


@pytest.fixture(scope="module", params=sorted(HYBRID))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint(folder, request.param), make_runner(folder)


def is_greedy(reference: PreTrainedModel, prompt: list[int], answer: list[int]) -> bool:
    assert len(set(answer)) > 3, "an answer that repeats itself shows little"
    return answer == greedy_tokens(reference, prompt, answer, NUM_TOKENS)


def test_float32_logits_agree(pair: Pair, tried: Tried, request: pytest.FixtureRequest) -> None:
    prompt = random_tokens(PROMPT_LEN, seed=3)
    expected = reference_logits(pair[0], prompt)
    error = (whole_logits(pair[1], prompt) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4
    tried(request.node.callspec.params["pair"], "wide", "float32")


@pytest.mark.parametrize("family", sorted(HYBRID))
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(
    family: str, tmp_path: Path, tried: Tried
) -> None:
    """By the quarter of tokens that differ least: see test_transformers_parity.py."""
    prompts = [random_tokens(PROMPT_LEN, seed) for seed in (3, 4)]
    exact = make_checkpoint(tmp_path, family, dtype=torch.bfloat16).float()
    runner = make_runner(tmp_path, dtype="bfloat16")
    expected = [reference_logits(exact, prompt) for prompt in prompts]
    rounded = exact.to(torch.bfloat16)
    own, theirs = (
        torch.cat(
            [(of(prompt) - logits).norm(dim=1) for prompt, logits in zip(prompts, expected, strict=True)]
        )
        for of in (partial(whole_logits, runner), partial(reference_logits, rounded))
    )
    assert own.quantile(0.25) < 1.5 * theirs.quantile(0.25)
    tried(family, "wide", "bfloat16")


def test_greedy_tokens_agree_however_the_prompt_was_chunked(pair: Pair) -> None:
    reference, runner = pair
    prompt, rng = random_tokens(PROMPT_LEN, seed=5), np.random.default_rng(6)
    for seed in range(2):
        sequence = sequences(runner, [prompt], seed)[0]
        while sequence.num_computed < PROMPT_LEN:
            run(runner, [(sequence, int(min(rng.integers(1, 40), PROMPT_LEN - sequence.num_computed)))])
        while len(sequence.output) < NUM_TOKENS:
            run(runner, [(sequence, 1)])
        assert is_greedy(reference, prompt, sequence.output)


def test_prefill_chunks_and_decode_steps_share_a_batch(pair: Pair) -> None:
    reference, runner = pair
    own = sequences(runner, [random_tokens(n, seed=n) for n in (PROMPT_LEN, 30, 2)], seed=10)
    for step in range(50):
        steps = [
            (sequence, min(len(sequence.token_ids) - sequence.num_computed, 11))
            for i, sequence in enumerate(own)
            if step >= 2 * i and len(sequence.output) < NUM_TOKENS  # one joins every other step
        ]
        if steps:
            run(runner, steps)
    for sequence in own:
        assert is_greedy(reference, sequence.prompt, sequence.output)


def test_a_shared_prefix_goes_on_from_its_snapshot(pair: Pair) -> None:
    reference, runner = pair
    prefix = random_tokens(3 * BLOCK_SIZE, seed=7)
    first, second = sequences(
        runner, [prefix + random_tokens(9, seed=8), prefix + random_tokens(14, seed=9)], seed=11
    )
    run(runner, [(first, 20)])
    first.mark = len(prefix) - 20
    run(runner, [(first, len(first.prompt) - 20)])
    count = len(first.snapshot)
    second.blocks[:3], second.states[:count] = first.blocks[:3], first.snapshot
    second.num_computed, second.source = len(prefix), 0
    run(runner, [(second, 14)])
    while len(second.output) < NUM_TOKENS:
        run(runner, [(first, 1), (second, 1)])
    for sequence in (first, second):
        assert is_greedy(reference, sequence.prompt, sequence.output[:NUM_TOKENS])


def test_generation_goes_on_from_blocks_copied_to_another_pool(pair: Pair) -> None:
    reference, runner = pair
    prompt = random_tokens(PROMPT_LEN, seed=11)
    (here,) = sequences(runner, [prompt], seed=12)
    run(runner, [(here, PROMPT_LEN)])
    num_states, used = num_state_blocks(runner), -(-PROMPT_LEN // BLOCK_SIZE)
    moved = [*here.blocks[:used], *here.states[:num_states]]
    content = runner.kv_cache.block_bytes_view[moved].copy()
    runner.kv_cache.pool.fill_(torch.nan)
    (there,) = sequences(runner, [prompt], seed=13)
    there.num_computed, there.output, there.source = PROMPT_LEN, list(here.output), 0
    runner.kv_cache.block_bytes_view[[*there.blocks[:used], *there.states[:num_states]]] = content
    while len(there.output) < NUM_TOKENS:
        run(runner, [(there, 1)])
    assert is_greedy(reference, prompt, there.output)


def test_layers_that_are_reported_are_final(pair: Pair) -> None:
    """Keys, values and states; nothing behind the layer that has been computed last is written yet."""
    runner = pair[1]
    runner.kv_cache.pool.fill_(torch.nan)
    (sequence,) = sequences(runner, [random_tokens(PROMPT_LEN, seed=14)], seed=15)
    sequence.mark = 2 * BLOCK_SIZE
    found, view = [], runner.kv_cache.layer_bytes_view

    def report(count: int) -> None:
        found.append((count, view[:, :count].copy()))
        rest = runner.kv_cache.pool[:, max(count, len(found) - 1) :]
        assert rest.isnan().all()

    step_logits(runner, [(sequence, PROMPT_LEN)], [PROMPT_LEN - 1], report)
    recurrent, num_layers = runner.config.recurrent, runner.config.num_cache_layers
    assert recurrent is not None
    assert [count for count, _ in found] == [0, *final_layers(recurrent)[:-1], num_layers]
    for count, content in found:
        np.testing.assert_array_equal(content, view[:, :count])
    written = (~runner.kv_cache.pool.isnan()).flatten(1).any(1).sum()
    assert written == -(-PROMPT_LEN // BLOCK_SIZE) + 2 * num_state_blocks(runner)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "family", sorted(HYBRID.keys() - {"lfm2_moe", "qwen3_5_images", "qwen3_5_moe_images"})
)
def test_two_ranks_are_the_same_model(family: str, exact: bool, tmp_path: Path) -> None:
    """Blocks go from each number of ranks to the other."""
    reference, prompt = make_checkpoint(tmp_path, family), random_tokens(PROMPT_LEN, seed=16)
    runners = [make_runner(tmp_path, tensor_parallel_size=size, exact=exact) for size in (1, 2)]
    for source, target in (runners, runners[::-1]):
        (here,) = sequences(source, [prompt], seed=17)
        run(source, [(here, 40)])
        target.kv_cache.block_bytes_view[:] = source.kv_cache.block_bytes_view
        run(target, [(here, PROMPT_LEN - 40)])
        while len(here.output) < NUM_TOKENS:
            run(target, [(here, 1)])
        assert is_greedy(reference, prompt, here.output)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "lfm2", "bamba", "granite_hybrid"])
def test_exact_bits_are_the_same_for_all_chunks_and_ranks(family: str, dtype: str, tmp_path: Path) -> None:
    """A mixture of experts is not split: each rank's part of an expert is summed apart. The gates of a token
    are no whole number of a CPU's vectors."""
    own = {"num_attention_heads": 6, "head_dim": 24} if family.startswith("qwen") else {}
    make_checkpoint(tmp_path, family, **own)
    prompt, found = random_tokens(PROMPT_LEN, seed=18), []
    for size, chunk in ((1, 80), (1, 7), (1, 1), (2, 33)):
        if family == "qwen3_next" and size > 1:
            continue
        runner = make_runner(tmp_path, dtype=dtype, exact=True, tensor_parallel_size=size)
        (sequence,) = sequences(runner, [prompt], seed=chunk)
        parts = []
        while sequence.num_computed < PROMPT_LEN:
            parts.append(step_logits(runner, [(sequence, min(chunk, PROMPT_LEN - sequence.num_computed))]))
        found.append(torch.cat(parts))
    assert all(torch.equal(each, found[0]) for each in found)
