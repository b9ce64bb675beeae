"""A quantised model is the function that its dequantised weights are in float32, as transformers computes
it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import make_checkpoint
from support.quantised_models import (
    PROMPT_LEN,
    all_logits,
    answer,
    assert_same_function,
    make_runner,
    random_tokens,
)
from transformers import PreTrainedModel

from splitserve.kernels.quantised import Scheme, quantise

pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)


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
    names = {make_runner(tmp_path, quantization=of).kv_name for of in ("none", "fp8", "int8", "int4")}
    assert len(names) == 4
