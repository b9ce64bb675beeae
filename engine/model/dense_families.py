"""The families without experts, by the architecture that config.json names."""

from __future__ import annotations

from dataclasses import replace

from .family import Family, TensorNames
from .family_rules import (
    cohere_scales,
    gemma_4_scales,
    gemma_scales,
    granite_scales,
    hyperclovax_scales,
    no_windows,
    same_window,
    windows_before_last,
    windows_behind_full,
    windows_by_layer,
    windows_by_pattern,
    windows_by_pattern_if_any,
)
from .mixture_config import MixtureNames

COHERE = Family(
    o_bias="attention_bias", layer_norms=True, parallel=True, interleaved_rope=True, scales=cohere_scales,
    tensors=TensorNames(post_norm=""), qk_norm="each",
    defaults={
        "tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5, "use_qk_norm": False,
        "rope_theta": 5e5,
    },
)  # fmt: skip
GEMMA_2 = Family(
    o_bias="attention_bias", unit_norms=True, scales=gemma_scales, windows=windows_by_pattern,
    tensors=TensorNames(
        attention_out_norm="post_attention_layernorm", post_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    ),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "vocab_size": 256000,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
        "max_position_embeddings": 8192, "sliding_window": 4096, "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
)  # fmt: skip
GEMMA_3 = replace(
    GEMMA_2,
    qk_norm="head",
    defaults={
        **GEMMA_2.defaults, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
)  # fmt: skip
GEMMA_4 = replace(
    GEMMA_3,
    windows=windows_before_last, unit_norms=False, values_normed=True, full_heads=True,
    qkv_bias="attention_bias", scales=gemma_4_scales,
    tensors=replace(GEMMA_3.tensors, scalar="layer_scalar"),
    mixture=MixtureNames(
        "router.proj", "experts.gate_up_proj", "", "experts.down_proj", stacked=True,
        beside=(
            "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
        ),
        router_scale="router.scale", expert_scale="router.per_expert_scale",
    ),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "vocab_size": 262144,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
        "sliding_window_pattern": 6, "max_position_embeddings": 131072, "enable_moe_block": False,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
            },
        },
    },
)  # fmt: skip
GEMMA_3_IN_PARTS = replace(
    GEMMA_3,
    part="text_config",
    tensors=replace(
        GEMMA_3.tensors,
        embed="language_model.model.embed_tokens", layer="language_model.model.layers.{}",
        norm="language_model.model.norm", head="language_model.lm_head",
        ignored=("vision_tower.", "multi_modal_projector."),
    ),
)  # fmt: skip
OLMO_2 = Family(
    o_bias="attention_bias", qk_norm="all",
    tensors=TensorNames(
        input_norm="", attention_out_norm="post_attention_layernorm", post_norm="",
        mlp_out_norm="post_feedforward_layernorm",
    ),
    defaults={"rms_norm_eps": 1e-5},
)  # fmt: skip
OLMO_3 = replace(
    OLMO_2,
    windows=windows_by_pattern,
    defaults={
        **OLMO_2.defaults, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 5e5,
        "rope_local_base_freq": 5e5,
    },
)  # fmt: skip
GLM = Family(
    interleaved_rope=True, tensors=TensorNames(gate="mlp.gate_up_proj", up=""),
    defaults={
        "head_dim": 128, "num_key_value_heads": 2, "attention_bias": True, "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
    },
)  # fmt: skip
DENSE: dict[str, Family] = {
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": replace(
        COHERE, windows=windows_by_pattern, windows_only_rope=True,
        defaults={
            **COHERE.defaults, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 1e4,
        },
    ),
    "CwmForCausalLM": Family(
        qkv_bias=False, mlp_bias="mlp_bias", windows=windows_behind_full,
        defaults={"head_dim": 128, "sliding_window": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "Ernie4_5ForCausalLM": Family(
        qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", interleaved_rope=True,
        defaults={"head_dim": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    ),
    "Exaone4ForCausalLM": Family(
        qkv_bias=False, qk_norm="head", windows=windows_by_pattern_if_any, windows_only_rope="sliding_window",
        tensors=OLMO_2.tensors,
        defaults={
            "sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
        },
    ),
    "Gemma2ForCausalLM": GEMMA_2,
    "Gemma3ForCausalLM": GEMMA_3,
    "Gemma3ForConditionalGeneration": GEMMA_3_IN_PARTS,
    "Gemma4ForCausalLM": GEMMA_4,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": replace(
        GLM,
        tensors=replace(
            GLM.tensors,
            attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm",
        ),
    ),
    "GraniteForCausalLM": Family(o_bias="attention_bias", mlp_bias="mlp_bias", scales=granite_scales),
    "GraniteSWAForCausalLM": Family(
        o_bias="attention_bias", mlp_bias="mlp_bias", scales=granite_scales, windows=windows_behind_full,
        tensors=TensorNames(sinks="self_attn.sinks"),
        defaults={
            "tie_word_embeddings": True, "sliding_window": 128, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        o_bias="attention_bias", qk_norm="head", norm_after_rope=True,
        tensors=TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "HyperCLOVAXForCausalLM": Family(
        o_bias="attention_bias", mlp_bias="mlp_bias", scales=hyperclovax_scales,
        tensors=TensorNames(attention_out_norm="post_norm1", mlp_out_norm="post_norm2"),
        defaults={"max_position_embeddings": 2048},
    ),
    "IQuestCoderForCausalLM": Family(
        o_bias="attention_bias", mlp_bias="mlp_bias", windows=no_windows,
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "InternLM3ForCausalLM": Family(
        qkv_bias=("qkv_bias", "attention_bias"), o_bias=("bias", "attention_bias"),
        mlp_bias=("bias", "mlp_bias"), defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "LlamaForCausalLM": Family(o_bias="attention_bias", mlp_bias="mlp_bias"),
    "Ministral3ForCausalLM": Family(
        qkv_bias=False, windows=same_window, defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "MistralForCausalLM": Family(windows=same_window, defaults={"sliding_window": 4096}),
    "Olmo2ForCausalLM": OLMO_2,
    "Olmo3ForCausalLM": OLMO_3,
    "Phi3ForCausalLM": Family(
        qkv_bias=False, windows=same_window, defaults={"rms_norm_eps": 1e-5},
        tensors=TensorNames(q="self_attn.qkv_proj", k="", v="", gate="mlp.gate_up_proj", up=""),
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=windows_by_layer, defaults={"sliding_window": 4096}),
    "Qwen3ForCausalLM": Family(
        o_bias="attention_bias", qk_norm="head", windows=windows_by_layer,
        defaults={"head_dim": 128, "sliding_window": 4096},
    ),
    "SeedOssForCausalLM": Family(
        o_bias="attention_out_bias", mlp_bias="mlp_bias", defaults={"attention_bias": True, "head_dim": 128},
    ),
    "SmolLM3ForCausalLM": Family(
        o_bias="attention_bias", mlp_bias="mlp_bias", windows=windows_by_layer,
        defaults={"tie_word_embeddings": True, "no_rope_layer_interval": 4, "rope_theta": 2e6},
    ),
}  # fmt: skip
