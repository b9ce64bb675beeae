"""The small checkpoints of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
)

Families: TypeAlias = dict[str, tuple[type[PreTrainedModel], Callable[..., Any], dict[str, Any]]]
"""By name: the model's class, its configuration's, and what differs from ``families.SMALL``."""
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "num_key_value_heads": 4,
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
CORRECTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
GRANITE = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
MIXTURES: Families = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "intermediate_size": 48}),
    "deepseek2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": 40,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "dots1": (
        Dots1ForCausalLM,
        Dots1Config,
        {
            **CORRECTED,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 5,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "exaone_moe": (
        ExaoneMoeForCausalLM,
        ExaoneMoeConfig,
        {
            **CORRECTED,
            "num_experts": 8,
            "num_shared_experts": 2,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {**CORRECTED, "attention_bias": True, "head_dim": 24, "num_attention_heads": 8},
    ),
    "glm4_moe_norms": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {**CORRECTED, "use_qk_norm": True, "norm_topk_prob": False, "n_group": 4, "topk_group": 2},
    ),
    "granite_moe": (GraniteMoeForCausalLM, GraniteMoeConfig, GRANITE),
    "granite_moe_shared": (
        GraniteMoeSharedForCausalLM,
        GraniteMoeSharedConfig,
        {**GRANITE, "shared_intermediate_size": 40},
    ),
    "hy_v3": (
        HYV3ForCausalLM,
        HYV3Config,
        {
            **CORRECTED,
            "num_experts": 8,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.3,
            "head_dim": 24,
        },
    ),
    "mellum": (
        MellumForCausalLM,
        MellumConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "head_dim": 24,
            "attention_bias": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
        },
    ),
    "minimax_m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config,
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "num_attention_heads": 8,
            "head_dim": 24,
            "rotary_dim": 12,
        },
    ),
    "olmoe": (
        OlmoeForCausalLM,
        OlmoeConfig,
        {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40},
    ),
    "solar_open": (
        SolarOpenForCausalLM,
        SolarOpenConfig,
        {**CORRECTED, "head_dim": 48, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "head_dim": 16,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}
