"""The small checkpoints with latent attention beside DeepSeek's own, and those of models for text and
images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import (
    AXK1Config,
    AXK1ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    YoutuConfig,
    YoutuForCausalLM,
)

from .dense_families import LLAMA3_ROPE, MINISTRAL_ROPE
from .mixture_families import CORRECTED, DEEPSEEK_ROPE, LATENT, Families

PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_IMAGES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
QWEN_3_IMAGES = {**QWEN_IMAGES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
GLM_IMAGES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 56,
    "patch_size": 14,
}
GLM_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e3,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 3, 3],
}
INTERNVL_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "attention_bias": True,
}
KIMI_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
SPARSE = {**LATENT, "q_lora_rank": 40, "index_topk": 24, "index_head_dim": 24, "index_n_heads": 16}
MISTRAL_4 = {
    **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    "q_lora_rank": 40,
    "rope_parameters": {**MINISTRAL_ROPE, "mscale": 0.7, "mscale_all_dim": 1.2},
}


def in_parts(
    config: Callable[..., PreTrainedConfig], images: dict[str, Any], model_type: str | None = None
) -> Callable[..., PreTrainedConfig]:
    """Make the configuration of the text model's values, with the smallest part for images."""

    def made(**text: Any) -> PreTrainedConfig:
        text = text if model_type is None else {"model_type": model_type, **text}
        whole = {"tie_word_embeddings": bool(text.get("tie_word_embeddings"))}
        return config(text_config=text, vision_config=dict(images), **whole)

    return made


WRAPPED: Families = {
    "exaone4_5": (
        Exaone4_5_ForConditionalGeneration,
        in_parts(Exaone4_5_Config, {**QWEN_IMAGES, "num_key_value_heads": 1}, "exaone4"),
        {"head_dim": 24, "sliding_window": 24, "sliding_window_pattern": 2, "rope_parameters": LLAMA3_ROPE},
    ),
    "glm4v": (
        Glm4vForConditionalGeneration,
        in_parts(Glm4vConfig, GLM_IMAGES, "glm4v_text"),
        {"rope_parameters": {**GLM_ROPE, "mrope_section": [1, 1, 2]}},
    ),
    "glm46v": (
        Glm46VForConditionalGeneration,
        in_parts(Glm46VConfig, GLM_IMAGES, "glm4v_text"),
        {"rope_parameters": {**GLM_ROPE, "mrope_section": [1, 1, 2]}},
    ),
    "glm4v_moe": (
        Glm4vMoeForConditionalGeneration,
        in_parts(Glm4vMoeConfig, GLM_IMAGES),
        {**CORRECTED, "attention_bias": True, "head_dim": 32, "rope_parameters": GLM_ROPE},
    ),
    "internvl": (InternVLForConditionalGeneration, in_parts(InternVLConfig, INTERNVL_IMAGES, "qwen2"), {}),
    "internvl_qwen3": (
        InternVLForConditionalGeneration,
        in_parts(InternVLConfig, INTERNVL_IMAGES, "qwen3"),
        {"head_dim": 32, "tie_word_embeddings": True},
    ),
    "internvl_qwen3_moe": (
        InternVLForConditionalGeneration,
        in_parts(InternVLConfig, INTERNVL_IMAGES, "qwen3_moe"),
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "internvl_gpt_oss": (
        InternVLForConditionalGeneration,
        in_parts(InternVLConfig, INTERNVL_IMAGES, "gpt_oss"),
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "kimi_k25": (
        Kimi_K25ForConditionalGeneration,
        in_parts(partial(Kimi_K25Config, projection_hidden_size=16), KIMI_IMAGES, "deepseek_v3"),
        {
            **LATENT,
            "q_lora_rank": 40,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.8,
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "mistral3": (
        Mistral3ForConditionalGeneration,
        in_parts(Mistral3Config, PIXTRAL, "mistral"),
        {"head_dim": 24, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "mistral3_ministral": (
        Mistral3ForConditionalGeneration,
        in_parts(Mistral3Config, PIXTRAL, "ministral3"),
        {"head_dim": 24, "rope_parameters": MINISTRAL_ROPE},
    ),
    "mistral3_mistral4": (
        Mistral3ForConditionalGeneration,
        in_parts(Mistral3Config, PIXTRAL, "mistral4"),
        MISTRAL_4,
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLForConditionalGeneration,
        in_parts(Qwen2_5_VLConfig, {**QWEN_IMAGES, "fullatt_block_indexes": [0]}),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [2, 3, 3]}},
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        in_parts(Qwen3VLConfig, QWEN_3_IMAGES),
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e3,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
    ),
}
WRAPPED["qwen3_vl_moe"] = (
    Qwen3VLMoeForConditionalGeneration,
    in_parts(Qwen3VLMoeConfig, QWEN_3_IMAGES),
    {
        **WRAPPED["qwen3_vl"][2],
        "tie_word_embeddings": False,
        "num_experts": 6,  # of 8 a row of bfloat16 takes another, in one of both models
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
)
LATENT_AND_WRAPPED: Families = WRAPPED | {
    "axk1": (
        AXK1ForCausalLM,
        AXK1Config,
        {**LATENT, "q_lora_rank": 40, "n_group": 2, "topk_group": 1, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "deepseek_v32": (
        DeepseekV32ForCausalLM,
        DeepseekV32Config,
        {**SPARSE, "n_group": 2, "topk_group": 1, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "glm4_moe_lite": (
        Glm4MoeLiteForCausalLM,
        Glm4MoeLiteConfig,
        {
            **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
            "q_lora_rank": 40,
            "routed_scaling_factor": 1.8,
            "n_shared_experts": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "glm_moe_dsa": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig,
        {**SPARSE, "index_topk_freq": 2, "rms_norm_eps": 1e-5},  # layers: full, full, shared
    ),
    "mistral4": (
        Mistral4ForCausalLM,
        Mistral4Config,
        {
            **MISTRAL_4,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
        },
    ),
    "youtu": (
        YoutuForCausalLM,
        YoutuConfig,
        {
            **{
                key: LATENT[key]
                for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            },
            "num_key_value_heads": 4,
            "q_lora_rank": 40,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
