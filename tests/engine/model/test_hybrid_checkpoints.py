"""Checkpoints of models with recurrent layers: as published, quantised, and those that are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import SMALL
from support.hybrid_families import DELTA_NET, FULL, SHORT_CONV
from support.models import make_checkpoint
from support.quantised_checkpoints import LEFT_OUT, SIDES, by_block, rewrite
from support.states import BLOCK_SIZE, make_runner, random_tokens, reference_logits, whole_logits
from transformers import PreTrainedModel

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.config import ModelConfig, parse_config
from splitserve.engine.model.model_folder import check_model_folder
from splitserve.engine.model.ranks import Rank, check_split, of_rank
from splitserve.engine.model.recurrent_config import final_layers
from splitserve.engine.model.tensors import expected_tensors
from splitserve.kernels.quantised import Scheme, quantise
from splitserve.kernels.state_shape import StatePlace

PROMPT = random_tokens(45, seed=3)
Tried: TypeAlias = Callable[[str, str, str], None]


def parsed(architecture: str, **values: Any) -> ModelConfig:
    return parse_config({"architectures": [architecture], **values}, {})


def error(folder: Path, reference: PreTrainedModel, **settings: Any) -> float:
    expected = reference_logits(reference, PROMPT)
    found = whole_logits(make_runner(folder, **settings), PROMPT)
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", ["qwen3_5_images", "qwen3_5_moe_images"])
def test_a_checkpoint_as_published(family: str, tmp_path: Path) -> None:
    """In several files, with images and a layer that predicts a further token."""
    reference = make_checkpoint(tmp_path, family)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("model.visual.") for name in tensors)
    file.unlink()
    tensors |= {
        "mtp.norm.weight": torch.ones(64),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(9, 64),
    }
    names = sorted(tensors)
    parts = {f"model-{i + 1}-of-3.safetensors": names[i::3] for i in range(3)}
    for part, own in parts.items():
        save_file({name: tensors[name] for name in own}, tmp_path / part)
    index = {"weight_map": {name: part for part, own in parts.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_model_folder(tmp_path)
    assert error(tmp_path, reference) < 1e-4


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_quantised_at_load(scheme: Scheme, tmp_path: Path, tried: Tried) -> None:
    tried("qwen3_next", "at load", scheme)
    reference = make_checkpoint(tmp_path, "qwen3_next")
    for name, module in reference.named_modules():
        if name.endswith(".experts"):
            for matrix in (*module.gate_up_proj.data, *module.down_proj.data):
                matrix.copy_(quantise(matrix.contiguous(), scheme).dequantised())
        left_out = ("shared_expert_gate", "lm_head") if scheme == "fp8" else "shared_expert_gate"
        if isinstance(module, torch.nn.Linear) and not name.endswith(left_out):
            own: Scheme = "int8" if name == "lm_head" else scheme
            module.weight.data = quantise(module.weight.data, own).dequantised()
    assert error(tmp_path, reference, quantization=scheme) < 2e-3, "more layers round than in other families"


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_float8_in_blocks(family: str, tmp_path: Path, tried: Tried) -> None:
    """Each expert has matrices of its own, and the rows of b and a are not quantised, as published."""
    tried(family, "checkpoint", "FP8 in blocks")
    settings = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": SIDES,
        "modules_to_not_convert": LEFT_OUT,
    }  # fmt: skip
    reference = rewrite(tmp_path, make_checkpoint(tmp_path, family), settings, by_block)
    check_model_folder(tmp_path)
    assert error(tmp_path, reference) < 5e-4


NEXT = {
    "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936, "num_attention_heads": 16,
    "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "intermediate_size": 5120, "head_dim": 256, "rope_theta": 1e7,
    "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
    "partial_rotary_factor": 0.25, "max_position_embeddings": 262144, "mlp_only_layers": [],
}  # fmt: skip
DENSE = {
    "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24,
    "num_key_value_heads": 4, "linear_num_value_heads": 48, "vocab_size": 248320, "attn_output_gate": True,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
MIXTURE = {
    **DENSE, "num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "linear_num_value_heads": 32, "layer_types": DENSE["layer_types"][:40],
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
del MIXTURE["intermediate_size"]


@pytest.mark.parametrize(
    ("architecture", "values", "billions", "blocks", "place"),
    [
        ("Qwen3NextForCausalLM", NEXT, 79.67, 201, StatePlace(1, 274432)),
        ("Qwen3_5ForConditionalGeneration", {"text_config": DENSE}, 26.90, 150, StatePlace(1, 204288)),
        ("Qwen3_5MoeForConditionalGeneration", {"text_config": MIXTURE}, 34.66, 201, StatePlace(1, 274432)),
    ],
)
def test_sizes_of_published_models(
    architecture: str, values: dict[str, Any], billions: float, blocks: int, place: StatePlace
) -> None:
    config = parsed(architecture, **values)
    size = sum(math.prod(shape) for shape in expected_tensors(config).values())
    assert size / 1e9 == pytest.approx(billions, abs=0.01)
    assert (config.num_cache_layers, config.ropes[0].rotary_dim, config.ropes[0].theta) == (
        config.num_layers // 4, 64, 1e7,
    )  # fmt: skip
    assert config.states is not None
    assert config.states.num_blocks(16, 2) == blocks
    assert config.states.place(5) == place


LFM2 = {
    "num_hidden_layers": 16, "hidden_size": 2048, "block_ff_dim": 12288, "norm_eps": 1e-5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "vocab_size": 65536,
    "conv_L_cache": 3, "conv_bias": False, "rope_theta": 1e6, "max_position_embeddings": 128000,
}  # fmt: skip
LFM2_MIXTURE = {
    "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_key_value_heads": 8, "use_expert_bias": True, "rope_theta": 1e6,
    "layer_types": [FULL if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
}  # fmt: skip
OLMO = {"num_hidden_layers": 32, "rope_parameters": {"rope_theta": None}}


@pytest.mark.parametrize(
    ("architecture", "values", "billions", "layers", "blocks", "place"),
    [
        ("Lfm2ForCausalLM", LFM2, 1.170, 6, 1, StatePlace(5, 512)),
        ("Lfm2MoeForCausalLM", LFM2_MIXTURE, 8.340, 6, 2, StatePlace(5, 2 * 512)),
        ("OlmoHybridForCausalLM", OLMO, 7.431, 8, 31, StatePlace(7, 2 * 19584)),
    ],
)
def test_sizes_of_other_published_models(
    architecture: str, values: dict[str, Any], billions: float, layers: int, blocks: int, place: StatePlace
) -> None:
    config = parsed(architecture, **values)
    size = sum(math.prod(shape) for shape in expected_tensors(config).values())
    assert size / 1e9 == pytest.approx(billions, abs=0.001)
    assert (config.num_cache_layers, config.ropes[0].rotary_dim) == (layers, 0 if values is OLMO else 64)
    assert config.states is not None
    assert config.states.num_blocks(16, 2) == blocks
    last = max(i for i, kind in enumerate(config.states.config.layers) if kind)
    assert config.states.place(last) == place


ARCHITECTURE = "Qwen3_5ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 8}, "one or more full_attention"),
        ({"layer_types": ["linear_attention"] * 7 + ["sliding_attention"]}, "each linear_attention or full"),
        ({"layer_types": ["full_attention"]}, "must name 8 layers"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh' is not built"),
        ({"attn_output_gate": False}, "without a gate"),
        ({"linear_num_value_heads": 3}, "3 heads of values and 2 of keys"),
        ({"num_key_value_heads": 4}, "beside 4 key-value heads"),
        ({"linear_value_head_dim": 20}, "multiples of 8"),
        ({"linear_key_head_dim": 0.5}, "'linear_key_head_dim' must be a positive whole number"),
        ({"use_sliding_window": True}, "windows of this family"),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parsed(ARCHITECTURE, **{**SMALL, **DELTA_NET, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"] * 8}, "one or more full_attention"),
        ({"layer_types": ["conv"] * 7 + ["sliding_attention"]}, "each conv or full"),
        ({"hidden_size": 72}, "72 channels and 3 tokens .* beside 2 key-value heads"),
        ({"conv_L_cache": 1}, "64 channels and 1 tokens"),
        ({"conv_bias": 1}, "'conv_bias' must be true or false"),
    ],
)
def test_short_convolutions_that_are_not_built_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parsed("Lfm2ForCausalLM", **{**SMALL, **SHORT_CONV, "head_dim": 16, **changes})


def test_layers_of_full_attention_alone_need_no_states() -> None:
    config = parsed(ARCHITECTURE, **{**SMALL, **DELTA_NET, "layer_types": ["full_attention"] * 8})
    assert (config.states, config.num_cache_layers) == (None, 8)


def test_more_ranks_than_key_value_heads_are_refused() -> None:
    config = parsed(ARCHITECTURE, **{**SMALL, **DELTA_NET})
    check_split(config, 2, exact=False)
    with pytest.raises(ModelConfigError, match=r"size 4 .* 2 key-value heads .*possible: 2"):
        check_split(config, 4, exact=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_dtype": "int8"}, "--kv-dtype is not there yet"),
        ({"kv_dtype": "fp8"}, "--kv-dtype is not there yet"),
        ({"block_size": 3}, "--block-size 3 does not fit .* a block has 384 bytes .* rows 512"),
    ],
)
def test_caches_that_cannot_hold_states_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "qwen3_5", linear_value_head_dim=128)
    with pytest.raises(ModelConfigError, match=message):
        make_runner(tmp_path, **settings)


def test_states_lie_behind_each_other_in_the_next_layer_of_full_attention() -> None:
    """Those behind the last one lie there, too. Each layer has two at most, for there are seven."""
    kinds = "LLFFLLLFLFL"
    layer_types = [{"L": "linear_attention", "F": "full_attention"}[kind] for kind in kinds]
    config = parsed(
        ARCHITECTURE, **{**SMALL, **DELTA_NET, "num_hidden_layers": 11, "layer_types": layer_types}
    )
    states, own = config.states, of_rank(config, Rank(1, 2)).states  # 1,312 floats in blocks of 1,024
    assert states is not None
    assert own is not None
    found = [(states.place(i).layer, states.place(i).offset) for i, kind in enumerate(kinds) if kind == "L"]
    assert found == [(0, 0), (0, 1312), (1, 0), (2, 0), (2, 1312), (3, 0), (3, 1312)]
    assert states.is_spread
    assert final_layers(states.config) == [1, 1, 3, 3], "the second layer is, behind the one at place 4"
    assert states.num_blocks(BLOCK_SIZE, 4) == 3
    assert states.num_blocks(2 * BLOCK_SIZE, 4) == 2
    assert own.num_blocks(BLOCK_SIZE, 4) == 3, "a rank's heads are a part of each block"
