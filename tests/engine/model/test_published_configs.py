"""config.json in the forms that makers of models publish: older keys than transformers writes today, the text
model's values within or without a part, and values that are null."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.config import ModelConfig, parse_config
from splitserve.engine.model.tensors import expected_tensors, ignored_tensors

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 32,
}
EXPERTS = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
INT4_EXPERTS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "actorder": None,
            },
            "input_activations": None,
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
}


def parsed(architecture: str, **values: Any) -> ModelConfig:
    return parse_config({"architectures": [architecture], **values}, {})


def test_ministral_3_in_float8() -> None:
    text = {**SIZES, "model_type": "ministral3", "head_dim": 128, "sliding_window": None}
    config = parsed(
        "Mistral3ForConditionalGeneration",
        model_type="mistral3",
        text_config={**text, "max_position_embeddings": 262144, "rope_parameters": MINISTRAL_ROPE},
        vision_config={"model_type": "pixtral"},
        tie_word_embeddings=False,
        quantization_config={
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        },
    )
    rope = config.ropes[0]
    assert (rope.type, rope.query_beta, rope.attention_factor) == ("yarn", 0.1, 1.0)
    assert config.max_model_len == 262144
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    assert expected_tensors(config)[f"{name}_scale_inv"] == ()
    assert "language_model.lm_head.weight" in expected_tensors(config)
    assert f"{name.removesuffix('weight')}activation_scale".endswith(ignored_tensors(config))


def test_mistral_small_3_has_a_head_of_its_own_whatever_is_left_out() -> None:
    """``tie_word_embeddings`` is left out, and true for transformers: a head that is there is used."""
    text = {**SIZES, "model_type": "mistral", "head_dim": 128, "sliding_window": None, "rope_theta": 1e9}
    config = parsed("Mistral3ForConditionalGeneration", text_config=text, vision_config={})
    assert (config.tie_word_embeddings, config.window, config.ropes[0].theta) == (True, 0, 1e9)
    assert "language_model.lm_head.weight" in ignored_tensors(config)


def test_other_text_models_in_mistrals_part_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="text model of type 'mistral5' is not supported"):
        parsed("Mistral3ForConditionalGeneration", text_config={**SIZES, "model_type": "mistral5"})


def test_qwen_2_5_vl_has_the_text_models_values_beside_the_others() -> None:
    config = parsed(
        "Qwen2_5_VLForConditionalGeneration",
        **SIZES,
        model_type="qwen2_5_vl",
        rope_theta=1e6,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        use_sliding_window=False,
        sliding_window=32768,
        max_window_layers=28,
        tie_word_embeddings=False,
        vision_config={"model_type": "qwen2_5_vl", "hidden_size": 1280},
    )
    assert (config.ropes[0].type, config.ropes[0].theta, config.qkv_bias) == ("default", 1e6, True)
    assert "model.layers.3.self_attn.q_proj.bias" in expected_tensors(config)
    assert "visual.blocks.0.attn.qkv.weight".startswith(ignored_tensors(config))


def test_qwen_3_vl() -> None:
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = {**SIZES, "head_dim": 128, "rope_theta": 5e6, "rope_scaling": rope, "attention_bias": False}
    config = parsed("Qwen3VLForConditionalGeneration", text_config=text, tie_word_embeddings=True)
    assert (config.ropes[0].type, config.ropes[0].theta, config.tie_word_embeddings) == ("default", 5e6, True)
    assert "model.language_model.layers.3.self_attn.k_norm.weight" in expected_tensors(config)
    assert "model.visual.pos_embed.weight".startswith(ignored_tensors(config))


def test_kimi_k2_5_has_its_quantisation_beside_the_text_model() -> None:
    text = {**SIZES, **LATENT, **EXPERTS, "model_type": "kimi_k2", "routed_scaling_factor": 2.827}
    config = parsed(
        "KimiK25ForConditionalGeneration",
        text_config={**text, "quantization_config": INT4_EXPERTS, "tie_word_embeddings": False},
        vision_config={},
        tie_word_embeddings=False,
    )
    expected, layer = expected_tensors(config), "language_model.model.layers.1"
    assert f"{layer}.mlp.experts.0.gate_proj.weight_packed" in expected
    assert f"{layer}.self_attn.kv_b_proj.weight" in expected
    assert f"{layer}.mlp.shared_experts.up_proj.weight" in expected
    assert "language_model.model.layers.0.mlp.down_proj.weight" in expected
    ignored = ignored_tensors(config)
    assert "language_model.model.layers.4.eh_proj.weight".startswith(ignored), "predicts further tokens"
    assert "mm_projector.linear_1.weight".startswith(ignored)
    assert "vision_tower.patch_embed.proj.weight".startswith(ignored)


def test_glm_4_7_flash() -> None:
    values = {
        "routed_scaling_factor": 1.8,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "rope_theta": 1e6,
    }
    config = parsed("Glm4MoeLiteForCausalLM", **{**SIZES, **LATENT, **EXPERTS}, **values)
    assert config.mixture is not None
    assert config.mixture.layers == (False, True, True, True)
    assert (config.mixture.shape.sigmoid, config.mixture.shape.factor, config.mixture.corrected) == (
        True,
        1.8,
        True,
    )
    assert "model.layers.4.shared_head.norm.weight".startswith(ignored_tensors(config))


@pytest.mark.parametrize("pattern", ["LLLG", 4])
def test_exaone_4_with_windows_rotates_in_their_layers_only(pattern: str | int) -> None:
    config = parsed(
        "Exaone4ForCausalLM",
        **SIZES,
        sliding_window=4096,
        sliding_window_pattern=pattern,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_theta=1e6,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    assert config.sliding_windows == (4096, 4096, 4096, None)
    assert [rope.type if rope.rotary_dim else "" for rope in config.ropes] == ["llama3"] * 3 + [""]


def test_exaone_4_without_windows_rotates_in_every_layer() -> None:
    kinds = ["full_attention"] * 4
    config = parsed(
        "Exaone4ForCausalLM", **SIZES, sliding_window=None, sliding_window_pattern=None, layer_types=kinds
    )
    assert not any(config.sliding_windows)
    assert all(rope.rotary_dim == 128 for rope in config.ropes)


def test_hunyuan_stretches_its_base_once() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    config = parsed(
        "HunYuanDenseV1ForCausalLM",
        **SIZES,
        head_dim=128,
        rope_theta=1e4,
        rope_scaling=scaling,
        use_qk_norm=True,
        attention_bias=False,
        tie_word_embeddings=True,
    )
    assert config.ropes[0].type == "default"
    assert config.ropes[0].theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert config.qk_norm == "head"


def test_seed_oss_and_ernie_and_glm_read_their_biases() -> None:
    seed = parsed("SeedOssForCausalLM", **SIZES, attention_bias=True, attention_out_bias=False, head_dim=128)
    assert (seed.qkv_bias, seed.o_bias, seed.mlp_bias) == (True, False, False)
    ernie = parsed("Ernie4_5ForCausalLM", **SIZES, use_bias=False, rope_theta=5e5, head_dim=128)
    assert (ernie.qkv_bias, ernie.o_bias, ernie.mlp_bias) == (False, False, False)
    glm = parsed("GlmForCausalLM", **SIZES, attention_bias=True, head_dim=128, partial_rotary_factor=0.5)
    assert (glm.qkv_bias, glm.o_bias, glm.ropes[0].rotary_dim) == (True, False, 64)


def test_youtu() -> None:
    config = parsed(
        "YoutuForCausalLM",
        **{**SIZES, **LATENT},
        rope_interleave=True,
        tie_word_embeddings=True,
        rope_theta=1.6e6,
    )
    assert (config.mixture, config.ropes[0].interleaved) == (None, True)
    assert "model.layers.0.mlp.gate_proj.weight" in expected_tensors(config)


def test_qwen_3_vl_with_experts_has_all_of_a_layer_in_one_tensor() -> None:
    text = {
        **SIZES,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 768,
    }
    config = parsed(
        "Qwen3VLMoeForConditionalGeneration",
        text_config={**text, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        vision_config={},
    )
    expected, experts = expected_tensors(config), "model.language_model.layers.3.mlp.experts"
    assert expected[f"{experts}.gate_up_proj"] == (8, 4096, 2 * 768)
    assert expected[f"{experts}.down_proj"] == (8, 768, 4096)
    assert f"{experts}.gate_up_proj_bias" not in expected


def test_a_layer_that_awq_leaves_out_may_end_with_a_dot() -> None:
    left_out = {"modules_to_not_convert": ["model.layers.1."], "quant_method": "awq", "bits": 4}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 64}
    awq = {**left_out, "group_size": 128, "version": "gemm", "zero_point": True}
    config = parsed("MiniMaxM2ForCausalLM", **{**SIZES, **experts}, quantization_config=awq)
    expected, w1 = expected_tensors(config), "block_sparse_moe.experts.0.w1"
    assert f"model.layers.1.{w1}.weight" in expected
    assert f"model.layers.0.{w1}.qweight" in expected


def test_queries_grow_without_yarn_too() -> None:
    rope = {**MINISTRAL_ROPE, "type": "default", "rope_type": "default"}
    plain = parsed("Ministral3ForCausalLM", **SIZES, rope_parameters=rope).ropes[0]
    assert (plain.type, plain.query_beta, plain.original_max_position_embeddings) == ("default", 0.1, 16384)
