"""A quantised model is the function that its dequantised weights are in float32, as transformers computes
it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import make_checkpoint
from support.quantised_models import assert_exact, assert_same_function, make_runner
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
    assert_exact(tmp_path, dtype, quantization=scheme)


def test_workers_of_another_quantisation_exchange_no_cache(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    names = {make_runner(tmp_path, quantization=of).kv_name for of in ("none", "fp8", "int8", "int4")}
    assert len(names) == 4
