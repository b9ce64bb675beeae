"""The small checkpoints without experts."""

from __future__ import annotations

from typing import Any

from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from .mixture_families import Families

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MINISTRAL_ROPE = {  # queries grow from the 33rd token on
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
LONGROPE = {  # heads of 16 numbers, 12 of them rotated; transformers chooses factors for each sequence
    "original_max_position_embeddings": 1,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "attention_factor": 1.2,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    },
}
GEMMA_2 = {  # the first cap is low enough to matter
    "head_dim": 24,
    "sliding_window": 24,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 60.0,
}
GEMMA_3 = {
    "head_dim": 24,
    "sliding_window": 24,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    },
}


def gemma3_in_parts(**text: Any) -> Gemma3Config:
    """With the smallest part for images."""
    images = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)


DENSE: Families = {
    "llama2": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "eos_token_id": [257, 258]}),
    "llama_biases": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama_linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama_dynamic": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24, "head_dim": 24}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "qwen2_yarn": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "cohere_plus": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": (Cohere2ForCausalLM, Cohere2Config, {"sliding_window": 24, "sliding_window_pattern": 2}),
    "ernie4_5": (
        Ernie4_5ForCausalLM,
        Ernie4_5Config,
        {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False},
    ),
    "exaone4": (
        Exaone4ForCausalLM,
        Exaone4Config,
        {"head_dim": 24, "sliding_window": 24, "sliding_window_pattern": 2, "rope_parameters": LLAMA3_ROPE},
    ),
    "exaone4_full": (
        Exaone4ForCausalLM,
        Exaone4Config,
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, GEMMA_2),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA_3),
    "gemma3_in_parts": (Gemma3ForConditionalGeneration, gemma3_in_parts, GEMMA_3),
    "glm": (GlmForCausalLM, GlmConfig, {"head_dim": 16}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"head_dim": 16}),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "granite_swa": (
        GraniteSWAForCausalLM,
        GraniteSWAConfig,
        {
            "sliding_window": 24,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
            "layer_rope_theta": [1e3, 0, 1e4],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "hunyuan": (
        HunYuanDenseV1ForCausalLM,
        HunYuanDenseV1Config,
        {
            "head_dim": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "ministral3": (
        Ministral3ForCausalLM,
        Ministral3Config,
        {"head_dim": 24, "rope_parameters": MINISTRAL_ROPE},
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config,
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e3,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
        },
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": 24}),
    "phi4_mini": (Phi3ForCausalLM, Phi3Config, {**LONGROPE, "tie_word_embeddings": True}),
    "phi4_mini_short": (Phi3ForCausalLM, Phi3Config, {**LONGROPE, "original_max_position_embeddings": 512}),
    "seed_oss": (
        SeedOssForCausalLM,
        SeedOssConfig,
        {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"num_hidden_layers": 4}),
}
