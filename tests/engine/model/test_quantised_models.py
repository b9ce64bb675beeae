"""A quantised model is the function that its dequantised weights are in float32, as transformers computes
it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import make_checkpoint
from support.quantised_models import assert_exact, assert_same_function, make_runner
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from splitserve.kernels.quantised import Scheme, quantise

pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)


@torch.no_grad()
def dequantise(model: PreTrainedModel, scheme: Scheme) -> PreTrainedModel:
    """Quantise and dequantise the weights of the linear layers, the experts and the head; not of routers,
    kv_b_proj and weights_proj."""
    for name, module in model.named_modules():
        if name.endswith(".experts") and isinstance(module.gate_up_proj, torch.nn.Parameter):
            for matrix in (*module.gate_up_proj, *module.down_proj):
                inputs_first = isinstance(module, GptOssExperts)
                own = matrix.T if inputs_first else matrix
                own.copy_(quantise(own.contiguous(), scheme).dequantised())
        if isinstance(module, torch.nn.Linear) and not name.endswith(
            ("kv_b_proj", "shared_expert_gate", "router.proj", "weights_proj")
        ):
            head = name == "lm_head"
            if head and scheme == "fp8":
                continue
            weight = quantise(module.weight, "int8" if head else scheme).dequantised()
            module.weight = torch.nn.Parameter(weight)  # of its own, where it was tied to the embedding
    return model


@pytest.mark.parametrize(
    "family",
    [
        "llama3",
        "qwen2",
        "glm4",
        "gemma4",
        "gemma4_moe",
        "qwen2_moe",
        "gpt_oss",
        "deepseek2",
        "deepseek3",
        "glm_moe_dsa",
    ],
)
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_checkpoint_quantised_at_load(
    tmp_path: Path, family: str, scheme: Scheme, tried: Callable[[str, str, str], None]
) -> None:
    tried(family, "at load", scheme)
    reference = dequantise(make_checkpoint(tmp_path, family), scheme)
    most = 2e-3 if family.startswith("gemma") else 5e-4  # there no embedding outweighs the layers' rounding
    assert_same_function(make_runner(tmp_path, quantization=scheme), reference, most)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen3", "int8"),
        ("qwen3", "int4"),
        ("qwen3", "fp8"),
        ("deepseek3", "int8"),
        ("deepseek_v32", "int8"),
        ("gpt_oss", "int4"),
    ],
)
def test_exact_mode_has_the_same_bits_in_chunks_and_steps_and_with_two_threads(
    tmp_path: Path, family: str, scheme: Scheme, dtype: str
) -> None:
    make_checkpoint(tmp_path, family)
    assert_exact(tmp_path, dtype, quantization=scheme)


def test_workers_of_another_quantisation_exchange_no_cache(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    names = {make_runner(tmp_path, quantization=of).loaded.kv_name for of in ("none", "fp8", "int8", "int4")}
    assert len(names) == 4
