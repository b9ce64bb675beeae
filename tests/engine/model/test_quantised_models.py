"""A quantised model is the function that its dequantised weights are in float32, as transformers computes
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import HandSequence, hidden_states, make_batch
from support.models import VOCAB_SIZE, make_checkpoint
from transformers import PreTrainedModel

from splitserve.engine.step.model_runner import EngineConfig, ModelRunner
from splitserve.kernels.quantised import Scheme, quantise

pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
BLOCK_SIZE, PROMPT_LEN, NUM_TOKENS = 8, 45, 16


def make_runner(folder: Path, dtype: str = "float32", **options: Any) -> ModelRunner:
    config = EngineConfig(folder, "cpu", dtype, BLOCK_SIZE, 96, **options)
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


def answer(runner: ModelRunner, prompt: list[int], chunk: int, seed: int) -> list[int]:
    """Greedy, the prompt in chunks, its blocks moved elsewhere after it."""
    here = HandSequence(prompt, blocks(len(prompt), seed))
    while here.num_computed < len(prompt):
        run(runner, here, min(chunk, len(prompt) - here.num_computed))
    moved = runner.kv_cache.block_bytes_view[here.blocks].copy()
    runner.kv_cache.pool.fill_(torch.nan)
    there = HandSequence(
        prompt, blocks(len(prompt) + NUM_TOKENS, seed + 1), num_computed=len(prompt), output=list(here.output)
    )
    runner.kv_cache.block_bytes_view[there.blocks[: len(here.blocks)]] = moved
    while len(there.output) < NUM_TOKENS:
        run(runner, there, 1)
    return there.output


@torch.inference_mode()
def assert_same_function(runner: ModelRunner, reference: PreTrainedModel) -> None:
    """Logits in one pass, and greedy tokens in chunks and steps. ``reference``: dequantised, float32."""
    prompt = random_tokens(PROMPT_LEN, seed=3)
    expected = reference(torch.tensor([prompt])).logits[0].float()
    error = (all_logits(runner, prompt) - expected).abs().max() / expected.abs().max()
    assert error < 5e-4
    out = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, PROMPT_LEN),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    assert answer(runner, prompt, 17, seed=5) == out[0, PROMPT_LEN:].tolist()


@torch.no_grad()
def dequantise(model: PreTrainedModel, scheme: Scheme) -> PreTrainedModel:
    """Quantise and dequantise the weights of the linear layers and of the head."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            head = name == "lm_head"
            if head and scheme == "fp8":
                continue
            weight = quantise(module.weight, "int8" if head else scheme).dequantised()
            module.weight = torch.nn.Parameter(weight)  # of its own, where it was tied to the embedding
    return model


@pytest.mark.parametrize("family", ["llama3", "qwen2", "glm4"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_checkpoint_quantised_at_load(tmp_path: Path, family: str, scheme: Scheme) -> None:
    reference = dequantise(make_checkpoint(tmp_path, family), scheme)
    assert_same_function(make_runner(tmp_path, quantization=scheme), reference)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_exact_mode_has_the_same_bits_in_chunks_and_steps_and_with_two_threads(
    tmp_path: Path, scheme: Scheme, dtype: str
) -> None:
    make_checkpoint(tmp_path, "qwen3")
    runner = make_runner(tmp_path, dtype, quantization=scheme, exact=True)
    prompt = random_tokens(PROMPT_LEN, seed=7)
    whole = all_logits(runner, prompt)
    for index in (1, 9, 30):
        assert torch.equal(all_logits(runner, prompt[:index]), whole[:index])
    tokens = answer(runner, prompt, 64, seed=8)
    assert answer(runner, prompt, 7, seed=11) == tokens
    two = make_runner(tmp_path, dtype, quantization=scheme, exact=True, num_threads=2)
    assert torch.equal(all_logits(two, prompt), whole)
    assert answer(two, prompt, 19, seed=13) == tokens


def test_workers_of_another_quantisation_exchange_no_cache(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    names = {make_runner(tmp_path, quantization=of).fingerprint for of in ("none", "fp8", "int8", "int4")}
    assert len(names) == 4
