"""A model that is split among ranks answers as the whole one does, and as transformers does; and its KV
blocks are those of the whole one."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.families import FAMILIES, VOCAB_SIZE
from support.greedy import greedy_tokens
from support.models import make_checkpoint

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.step.model_runner import ModelRunner

BLOCK_SIZE, NUM_BLOCKS, PROMPT_LEN, NUM_TOKENS = 16, 32, 75, 16
THREE_HEADS = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 192,
}


def make_runner(folder: Path, size: int, dtype: str = "float32", **settings: object) -> ModelRunner:
    """With a poisoned pool: whatever reads what no rank has written yields NaN."""
    config = engine_config(
        folder, "cpu", dtype, BLOCK_SIZE, NUM_BLOCKS, tensor_parallel_size=size, **settings
    )
    runner = ModelRunner(config)
    if runner.kv_cache.pool.is_floating_point():
        runner.kv_cache.pool.fill_(torch.nan)
    return runner


def random_tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, count)]


def prefill(runner: ModelRunner, prompt: list[int], chunk: int, first_block: int) -> HandSequence:
    blocks = list(range(first_block, first_block - (-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE)))
    sequence = HandSequence(prompt, blocks)
    while sequence.num_computed < len(prompt):
        step(runner, sequence, min(chunk, len(prompt) - sequence.num_computed))
    return sequence


def step(runner: ModelRunner, sequence: HandSequence, count: int) -> None:
    token = int(runner.execute(make_batch([(sequence, count)], BLOCK_SIZE)).token_ids[0])
    sequence.num_computed += count
    if token >= 0:
        sequence.output.append(token)


def decoded(runner: ModelRunner, sequence: HandSequence) -> list[int]:
    while len(sequence.output) < NUM_TOKENS:
        step(runner, sequence, 1)
    return sequence.output


def moved(source: ModelRunner, target: ModelRunner, sequence: HandSequence) -> HandSequence:
    """Its blocks, as a mover takes them: bytes of the pool, whatever the number of ranks."""
    there = HandSequence(
        sequence.prompt,
        [block + 9 for block in sequence.blocks],
        num_computed=sequence.num_computed,
        output=list(sequence.output),
    )
    target.kv_cache.block_bytes_view[there.blocks] = source.kv_cache.block_bytes_view[sequence.blocks]
    return there


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_split(family: str, tmp_path: Path) -> None:
    """By 2 and by 4: of the two key-value heads each is then on two ranks. Blocks go from each number of
    ranks to another."""
    reference, prompt = make_checkpoint(tmp_path, family), random_tokens(PROMPT_LEN, seed=5)
    runners = [make_runner(tmp_path, size) for size in (1, 2, 4)]
    for chunk, (source, target) in enumerate(zip(runners, [*runners[1:], runners[0]], strict=True), start=30):
        here = prefill(source, prompt, chunk, first_block=2)
        there = decoded(target, moved(source, target, here))
        expected = greedy_tokens(reference, prompt, there, NUM_TOKENS)
        assert there == decoded(source, here) == expected
    assert len(set(expected)) > 3, "an answer that repeats itself shows little"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["int8", "auto"])
def test_a_vocabulary_that_does_not_divide(dtype: str, kv_dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3", **THREE_HEADS, vocab_size=VOCAB_SIZE + 2)
    prompt = random_tokens(PROMPT_LEN, seed=6)
    whole, three = (make_runner(tmp_path, size, dtype, kv_dtype=kv_dtype) for size in (1, 3))
    batch = make_batch([(HandSequence(prompt, list(range(5))), PROMPT_LEN)], BLOCK_SIZE, prompt_logprobs=2)
    expected, found = (runner.execute(batch).prompt_logprobs[0] for runner in (whole, three))
    errors = [abs(mine.logprob - theirs.logprob) for mine, theirs in zip(found, expected, strict=True)]
    assert max(errors) < (1e-3 if dtype == "float32" else 1.5), "of logprobs down to -40"
    assert np.mean(errors) < (1e-4 if dtype == "float32" else 0.2)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.3), ("int4", 0.005)])
def test_weights_quantised_at_load(quantization: str, most: float, tmp_path: Path) -> None:
    """In int8 each rank's part of a row has a scale of its own: it rounds otherwise than the whole row."""
    make_checkpoint(tmp_path, "qwen3", intermediate_size=128)
    prompt = random_tokens(PROMPT_LEN, seed=7)
    batch = make_batch([(HandSequence(prompt, list(range(5))), PROMPT_LEN)], BLOCK_SIZE, prompt_logprobs=0)
    whole, split = (
        make_runner(tmp_path, size, quantization=quantization).execute(batch).prompt_logprobs[0]
        for size in (1, 2)
    )
    errors = [abs(mine.logprob - theirs.logprob) for mine, theirs in zip(split, whole, strict=True)]
    assert np.mean(errors) < most, "of logprobs down to -40"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "family",
    [
        "llama3",
        "cohere_plus",
        "deepseek2",
        "deepseek_v32",
        "gemma2",
        "gemma4",
        "glm_moe_dsa",
        "olmo2",
        "phi3",
    ],
)
def test_exact_bits_are_the_same_for_every_number_of_ranks(family: str, dtype: str, tmp_path: Path) -> None:
    """And for every way to chunk the prompt. A quarter of an MLP's columns is no whole number of a CPU's
    vectors."""
    dense = {"first_k_dense_replace": 3} if family.startswith(("deepseek", "glm_moe")) else {}
    make_checkpoint(tmp_path, family, **dense)
    prompt, found = random_tokens(PROMPT_LEN, seed=8), []
    for size, chunk in ((1, 80), (2, 80), (2, 7), (4, 33)):
        runner = make_runner(tmp_path, size, dtype, exact=True)
        sequence = prefill(runner, prompt, chunk, 0)
        answer = decoded(runner, sequence)
        blocks = runner.kv_cache.block_bytes_view[sequence.blocks[:5]]  # full ones
        found.append((answer, blocks.tobytes(), runner.loaded.numerics))
    assert found.count(found[0]) == len(found)


def test_exact_experts_are_summed_over_ranks_and_say_so(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral")
    prompt, runner = random_tokens(PROMPT_LEN, seed=8), make_runner(tmp_path, 2, "bfloat16", exact=True)
    whole = prefill(runner, prompt, 80, 0)
    blocks = runner.kv_cache.block_bytes_view[whole.blocks[:4]].copy()
    chunked = prefill(runner, prompt, 7, 16)
    np.testing.assert_array_equal(runner.kv_cache.block_bytes_view[chunked.blocks[:4]], blocks)
    assert decoded(runner, chunked) == decoded(runner, whole)
    assert runner.loaded.numerics.endswith("experts with --tensor-parallel-size 2")


def test_a_model_that_cannot_be_split_so(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral", num_attention_heads=8)
    with pytest.raises(ModelConfigError, match=r"3 does not divide 8 attention heads .*possible: 2, 4, 8\)"):
        make_runner(tmp_path, 3)
    make_checkpoint(tmp_path / "beside", "gemma4_moe", intermediate_size=162)
    with pytest.raises(ModelConfigError, match=r"162 columns of an MLP .*\(possible: 2\)"):
        make_runner(tmp_path / "beside", 4)


def test_layers_are_reported_when_all_ranks_have_written_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    runner = make_runner(tmp_path, 2)
    slow = runner.ranks[1].kernels
    store = slow.rope_and_store
    slow.rope_and_store = lambda *args: (time.sleep(0.02), store(*args))[1]  # type: ignore[method-assign]
    seen: list[np.ndarray] = []
    layers = runner.kv_cache.layer_bytes_view
    batch = make_batch([(HandSequence(random_tokens(20, seed=9), [0, 1]), 20)], BLOCK_SIZE)
    runner.execute(batch, on_layer=lambda n: seen.append(layers[:2, :n].copy()))
    assert [view.shape[1] for view in seen] == [0, 0, 1, 2, 3]
    for view in seen:
        np.testing.assert_array_equal(view, layers[:2, : view.shape[1]])


@pytest.mark.parametrize("family", ["llama2", "deepseek2"])
def test_a_rank_that_fails_ends_the_step_for_all(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family)
    runner, prompt = make_runner(tmp_path, 4), random_tokens(20, seed=10)
    expected = decoded(runner, prefill(runner, prompt, 20, 0))
    for number in range(4):

        def fail(*_: object, number: int = number) -> None:
            raise MemoryError(f"of rank {number}")

        with monkeypatch.context() as patched:
            patched.setattr(runner.ranks[number].decoder, "project_last", fail)
            with pytest.raises(MemoryError, match=f"of rank {number}"):
                prefill(runner, prompt, 20, 8)
        assert decoded(runner, prefill(runner, prompt, 20, 16)) == expected
