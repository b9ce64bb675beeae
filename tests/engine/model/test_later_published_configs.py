"""config.json as published, continued: families of 2025 and 2026."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine.model.test_published_configs import LATENT, MINISTRAL_ROPE, SIZES, parsed

from splitserve.engine.analytic.shapes import shape_of
from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.tensors import expected_tensors, ignored_tensors

MISTRAL_4 = {
    **SIZES,
    **LATENT,
    "model_type": "mistral4",
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rope_interleave": True,
    "rope_parameters": {**MINISTRAL_ROPE, "partial_rotary_factor": 0.5},
}
FLOAT8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def mistral_4(**quantisation: Any) -> dict[str, Any]:
    left_out = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    return {
        "model_type": "mistral3",
        "text_config": MISTRAL_4,
        "vision_config": {"model_type": "pixtral"},
        "tie_word_embeddings": False,
        "quantization_config": {**FLOAT8, "modules_to_not_convert": left_out, **quantisation},
    }


def test_mistral_small_4_in_float8() -> None:
    config = parsed("Mistral3ForConditionalGeneration", **mistral_4())
    assert config.latent is not None
    assert config.mixture is not None
    assert config.latent.cached == 320
    assert config.mixture.layers == (True,) * 4
    assert (config.ropes[0].rotary_dim, config.ropes[0].query_beta) == (64, 0.1), "all of the rotated part"
    shape = config.mixture.shape
    assert (shape.sigmoid, shape.num_chosen, shape.shared_size) == (False, 4, 2048)
    expected, layer = expected_tensors(config), "language_model.model.layers.0"
    assert expected[f"{layer}.mlp.experts.gate_up_proj"] == (128, 4096, 4096)
    assert expected[f"{layer}.mlp.experts.down_proj_scale_inv"] == (128, 1, 1)
    assert expected[f"{layer}.self_attn.kv_b_proj.weight_scale_inv"] == ()
    assert f"{layer}.mlp.experts.gate_up_proj_activation_scale".endswith(ignored_tensors(config))
    assert config.quantisation is not None
    sizes = [config.quantisation.element_bytes(name, 2) for name in expected if ".experts." in name]
    assert sizes == [1, 2, 1, 2] * 4, "numbers and scales of gate_up and of down"


@pytest.mark.parametrize(
    "architecture_and_fields",
    [
        ("Mistral3ForConditionalGeneration", mistral_4(weight_block_size=[128, 128])),
        (
            "GraniteMoeForCausalLM",
            {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "quantization_config": FLOAT8},
        ),
    ],
)
def test_other_quantised_experts_in_one_tensor_are_refused(
    architecture_and_fields: tuple[str, dict[str, Any]],
) -> None:
    architecture, fields = architecture_and_fields
    config = parsed(architecture, **fields)
    with pytest.raises(ModelConfigError, match=r"experts of .* in one tensor .* is not supported"):
        expected_tensors(config)


def test_internlm_3_names_biases_in_its_own_way() -> None:
    values = {
        **SIZES,
        "head_dim": 128,
        "rope_theta": 5e7,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    }
    config = parsed("InternLM3ForCausalLM", **values, qkv_bias=False, bias=True)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, True, True)
    config = parsed("InternLM3ForCausalLM", **values, qkv_bias=True, bias=False)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    assert (config.ropes[0].type, config.max_model_len) == ("dynamic", SIZES["max_position_embeddings"])


def test_iquest_coder_with_windows_is_refused() -> None:
    inert = {"clip_qkv": None, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 0}
    config = parsed("IQuestCoderForCausalLM", **SIZES, **inert)
    assert config.sliding_windows == (None,) * 4
    with pytest.raises(ModelConfigError, match="windows of this family"):
        parsed("IQuestCoderForCausalLM", **SIZES, use_sliding_window=True, sliding_window=4096)
    with pytest.raises(ModelConfigError, match="clip_qkv"):
        parsed("IQuestCoderForCausalLM", **SIZES, clip_qkv=8.0)


def test_exaone_4_5_by_its_first_name_of_the_text_model() -> None:
    text = {**SIZES, "model_type": "exaone4_5_text", "sliding_window": 4096, "sliding_window_pattern": 4}
    config = parsed("Exaone4_5_ForConditionalGeneration", text_config=text, vision_config={})
    assert config.sliding_windows == (4096, 4096, 4096, None)
    assert "model.language_model.layers.0.self_attn.q_norm.weight" in expected_tensors(config)
    for ignored in ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.up_proj.weight"):
        assert ignored.startswith(ignored_tensors(config))


def test_hyperclova_x_multiplies_logits() -> None:
    values = {**SIZES, "head_dim": 128, "embedding_multiplier": 10.0, "logits_scaling": 0.125}
    config = parsed("HyperCLOVAXForCausalLM", **values, attention_multiplier=0.0078125)
    assert (config.scales.logits, config.scales.attention) == (0.125, 0.0078125)
    assert "model.layers.0.post_norm2.weight" in expected_tensors(config)
    assert parsed("HyperCLOVAXForCausalLM", **values).scales.attention == 128**-0.5
    assert parsed("HyperCLOVAXForCausalLM", **values, attention_multiplier=None).scales.attention == 128**-0.5
    with pytest.raises(ModelConfigError, match="'attention_multiplier' must be a number above 0, found None"):
        parsed("GraniteForCausalLM", **values, attention_multiplier=None)
    without = parsed("HyperCLOVAXForCausalLM", **values, use_post_norm=False)
    assert "model.layers.0.post_norm1.weight" not in expected_tensors(without)


def test_mellum_2_by_layer() -> None:
    config = parsed(
        "MellumForCausalLM",
        **SIZES,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=896,
        num_nextn_predict_layers=1,
        sliding_window=1024,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert config.sliding_windows == (1024, 1024, 1024, None)
    assert [rope.theta for rope in config.ropes] == [1e4, 1e4, 1e4, 5e5]
    assert "model.layers.3.mlp.experts.63.down_proj.weight" in expected_tensors(config)
    assert "mtp.layers.0.input_layernorm.weight".startswith(ignored_tensors(config))


GEMMA_4 = {
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": None,
    "num_attention_heads": 32,
    "num_experts": None,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
GEMMA_4_26B = {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}


@pytest.mark.parametrize(("own", "billions"), [({}, 30.70), (GEMMA_4_26B, 25.23)])
def test_gemma_4_as_published(own: dict[str, Any], billions: float) -> None:
    """Images see later tokens of themselves ("vision"); texts do not."""
    text = {**GEMMA_4, **own}
    values = {"text_config": text, "vision_config": {}, "audio_config": None, "tie_word_embeddings": True}
    config = parsed("Gemma4ForConditionalGeneration", **values)
    heads, full = config.heads_of(0), config.heads_of(5)
    assert (heads.head_dim, heads.num_kv_heads) == (256, text["num_key_value_heads"])
    assert (full.head_dim, full.num_kv_heads) == (512, text["num_global_key_value_heads"])
    assert full.keys_are_values
    assert (config.ropes[0].theta, config.ropes[5].turned) == (1e4, 64)
    expected, layer = expected_tensors(config), "model.language_model.layers"
    assert f"{layer}.5.self_attn.v_proj.weight" not in expected
    assert (f"{layer}.0.experts.gate_up_proj" in expected) == bool(own)
    size = sum(math.prod(shape) for shape in expected.values())
    assert size / 1e9 == pytest.approx(billions, abs=0.01)
    assert shape_of(values).weights == pytest.approx(size, rel=0.03)
    with pytest.raises(ModelConfigError, match="attention to later tokens"):
        parsed(
            "Gemma4ForConditionalGeneration",
            **{**values, "text_config": {**text, "use_bidirectional_attention": "all"}},
        )


DEEPSEEK_3_2 = {
    "model_type": "deepseek_v32", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
    "max_position_embeddings": 163840, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip
GLM_5_2 = {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "num_hidden_layers": 78, "num_attention_heads": 64,
    "num_key_value_heads": 64, "head_dim": 192, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_interleave": True,
    "indexer_rope_interleave": True, "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128,
    "index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": None,
    "index_share_for_mtp_iteration": True, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
    "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 75], "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}  # fmt: skip


def test_deepseek_3_2_as_published() -> None:
    config = parsed("DeepseekV32ForCausalLM", **DEEPSEEK_3_2)
    assert config.index is not None
    assert (config.index.chosen, config.index.interleaved, all(config.index.layers)) == (2048, False, True)
    assert (config.head_dim, config.cached_row) == (576, 704)
    expected, name = expected_tensors(config), "model.layers.60.self_attn.indexer"
    assert expected[f"{name}.wq_b.weight"] == (8192, 1536)
    assert expected[f"{name}.wq_b.weight_scale_inv"] == (64, 12)
    assert expected[f"{name}.wk.weight_scale_inv"] == (1, 56)
    assert expected[f"{name}.k_norm.bias"] == (128,)
    assert expected[f"{name}.weights_proj.weight"] == (64, 7168)
    assert f"{name}.weights_proj.weight_scale_inv" not in expected
    assert "model.layers.61.self_attn.indexer.wk.weight".startswith(ignored_tensors(config))
    size = sum(math.prod(of) for of_name, of in expected.items() if not of_name.endswith("scale_inv"))
    assert size / 1e9 == pytest.approx(671.9, abs=0.1)
    assert shape_of(DEEPSEEK_3_2).weights == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("named", [True, False])
def test_glm_5_2_as_published(named: bool) -> None:
    """Its layers are named, and by the pattern that stands beside them."""
    kinds = [*["full"] * 3, *["full" if i % 4 == 2 else "shared" for i in range(3, 78)]]
    config = parsed("GlmMoeDsaForCausalLM", **GLM_5_2, **({"indexer_types": kinds} if named else {}))
    assert config.index is not None
    assert config.index.interleaved
    assert config.index.layers == tuple(kind == "full" for kind in kinds)
    assert sum(config.index.layers) == 21
    expected = expected_tensors(config)
    assert expected["model.layers.6.self_attn.indexer.wk.weight"] == (128, 6144)
    assert "model.layers.7.self_attn.indexer.wk.weight" not in expected
    assert "model.layers.7.self_attn.indexer.wk.weight".startswith(ignored_tensors(config))
    assert config.latent is not None
    assert config.latent.expanded == 256
