"""What published checkpoints of mixtures have beside their weights: fields of config.json, and layers that
predict further tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, SMALL
from support.models import make_checkpoint
from support.quantised_checkpoints import rewrite_in_float8
from support.quantised_models import PROMPT_LEN, answer, assert_same_function, make_runner, random_tokens

from splitserve.engine.errors import ModelConfigError, WeightsError
from splitserve.engine.model.config import parse_config
from splitserve.engine.model.model_folder import check_model_folder

GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 202752,
    "model_type": "glm4_moe", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": True,
    "vocab_size": 151552,
}  # fmt: skip
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
    "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000,
    "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "sliding_window": None,
    "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
    "vocab_size": 200064,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip
FURTHER = [
    ("glm4_moe", "model.layers.3.eh_proj.weight", {"num_nextn_predict_layers": 1}),
    ("minimax_m2", "model.layers.4.block_sparse_moe.gate.weight", {"num_mtp_modules": 2}),
    ("hy_v3", "model.layers.3.final_layernorm.weight", {"num_nextn_predict_layers": 1}),
    ("exaone_moe", "mtp.layers.0.self_attn.q_proj.weight", {}),
    ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj.weight", {}),
]


def test_a_x_k1_has_no_corrections_and_a_norm_that_dense_layers_do_not_use(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "axk1")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
            del tensors[name]
    tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.full((64,), 7.0)
    save_file(tensors, file)
    check_model_folder(tmp_path)
    assert_same_function(make_runner(tmp_path), reference)
    del tensors["model.layers.1.post_mlp_layernorm.weight"]
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"1 missing: model\.layers\.1\.post_mlp_layernorm\.weight"):
        check_model_folder(tmp_path)


def test_mistral_4_in_float8(tmp_path: Path, tried: Callable[[str, str, str], None]) -> None:
    tried("mistral4", "checkpoint", "FP8 by matrix")
    reference = rewrite_in_float8(tmp_path, make_checkpoint(tmp_path, "mistral4"))
    check_model_folder(tmp_path)
    whole, split = make_runner(tmp_path), make_runner(tmp_path, tensor_parallel_size=2)
    assert_same_function(whole, reference)
    prompt = random_tokens(PROMPT_LEN, seed=4)
    assert answer(split, prompt, 17, seed=5) == answer(whole, prompt, 17, seed=5)


def test_glm_4_6() -> None:
    config = parse_config(GLM, {})
    assert config.mixture is not None
    assert [config.mixture.layers.index(True), config.mixture.shape.shared_size] == [3, 1536]
    assert [config.ropes[0].rotary_dim, config.qk_norm, config.qkv_bias, config.o_bias] == [
        64, "head", True, False
    ]  # fmt: skip
    assert [config.mixture.corrected, config.mixture.shape.sigmoid] == [True, True]


def test_minimax_m2() -> None:
    config = parse_config(MINIMAX, {})
    assert config.mixture is not None
    assert all(config.mixture.layers)
    assert [config.ropes[0].rotary_dim, config.qk_norm, config.mixture.shape.shared_size] == [64, "all", 0]
    assert config.quantisation is not None
    layer = "model.layers.0.block_sparse_moe"
    assert config.quantisation.of(f"{layer}.gate") is None
    scheme = config.quantisation.of(f"{layer}.experts.0.w1")
    assert scheme is not None
    assert scheme.block == (128, 128)


def test_k_exaone() -> None:
    """Its pattern stands in letters, beside the layers' kinds; without windows every layer has rope."""
    own = {**FAMILIES["exaone_moe"][2], "num_hidden_layers": 4, "sliding_window_pattern": "LLLG"}
    own["mlp_layer_types"] = ["dense", "sparse", "sparse", "sparse"]
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    config = {**SMALL, **own, "architectures": ["ExaoneMoEForCausalLM"]}
    found = parse_config({**config, "layer_types": kinds}, {})
    assert found.sliding_windows == (24, 24, 24, None)
    assert [rope.rotary_dim for rope in found.ropes] == [16, 16, 16, 0]
    assert found.mixture is not None
    assert found.mixture.layers == (False, True, True, True)
    without = parse_config({**config, "layer_types": kinds[3:] * 4, "sliding_window": None}, {})
    assert [rope.rotary_dim for rope in without.ropes] == [16] * 4


def test_dots_calls_its_scores_by_their_correction() -> None:
    published = {"scoring_func": "noaux_tc", "n_routed_experts": 8, "num_experts_per_tok": 2}
    config = parse_config({**SMALL, "architectures": ["Dots1ForCausalLM"], **published}, {})
    assert config.mixture is not None
    assert [config.mixture.corrected, config.mixture.shape.sigmoid] == [True, True]


@pytest.mark.parametrize(("family", "name", "fields"), FURTHER)
def test_layers_that_predict_further_tokens_are_left_out(
    family: str, name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_checkpoint(tmp_path, family, **fields)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: torch.ones(3, 5)}, path, metadata={"format": "pt"})
    check_model_folder(tmp_path)
    assert_same_function(make_runner(tmp_path), reference)
    layers = FAMILIES[family][2].get("num_hidden_layers", SMALL["num_hidden_layers"])
    beyond = f"model.layers.{layers + 3}.eh_proj.weight"
    save_file({**tensors, beyond: torch.ones(3, 5)}, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match="unexpected"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("family", "fields", "found"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("minimax_m2", {"rotary_dim": -4}, "rotary_dim"),
        ("minimax_m2", {"num_mtp_modules": 10**9}, "num_mtp_modules"),
    ],
)
def test_what_cannot_be_served_is_refused(family: str, fields: dict[str, Any], found: str) -> None:
    model_class, _, own = FAMILIES[family]
    config = {**SMALL, **own, "architectures": [model_class.__name__], **fields}
    with pytest.raises(ModelConfigError, match=found):
        parse_config(config, {})
