"""The small checkpoints of models in which most layers are recurrent."""

from __future__ import annotations

from typing import Any

from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from .latent_and_wrapped_families import QWEN_3_IMAGES, in_parts
from .mixture_families import Families

LINEAR, FULL = "linear_attention", "full_attention"
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 8,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
IN_PARTS = {
    **DELTA_NET,
    "num_hidden_layers": 4,
    "rope_parameters": {
        **DELTA_NET["rope_parameters"],
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
SHORT_CONV: dict[str, Any] = {
    "num_hidden_layers": 8,
    "layer_types": ["conv", "conv", FULL, "conv", FULL, "conv", "conv", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    "conv_L_cache": 3,
    "conv_bias": True,
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 5,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 1,
}
GRANITE: dict[str, Any] = {
    **MAMBA,
    "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "shared_intermediate_size": 48,
    "position_embedding_type": "nope",
}
HYBRID: Families = {
    "bamba": (
        BambaForCausalLM,
        BambaConfig,
        {**MAMBA, "mamba_n_groups": 2, "attn_layer_indices": [1, 3], "mamba_proj_bias": True},
    ),
    "granite_hybrid": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {**GRANITE, "num_local_experts": 0},
    ),
    "granite_hybrid_moe": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    ),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config, {**SHORT_CONV, "block_multiple_of": 16}),
    "lfm2_moe": (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig,
        {
            **SHORT_CONV,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_dense_layers": 2,
            "conv_bias": False,
        },
    ),
    "olmo_hybrid": (
        OlmoHybridForCausalLM,
        OlmoHybridConfig,
        {
            "num_hidden_layers": 5,
            "layer_types": [LINEAR, FULL, LINEAR, FULL, LINEAR],
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 48,
            "rope_parameters": {"rope_theta": None},  # as published: there is none
        },
    ),
    "nemotron_h": (
        NemotronHForCausalLM,
        NemotronHConfig,
        {
            "layers_block_type": [LINEAR, "moe", LINEAR, FULL, "mlp", LINEAR, "mlp", FULL, "moe", LINEAR],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 24,
            "ssm_state_size": 16,
            "n_groups": 4,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {
            **DELTA_NET,
            **EXPERTS,
            "mlp_only_layers": [1],
            "num_hidden_layers": 5,
            "layer_types": [
                "linear_attention",
                "full_attention",
                *["linear_attention"] * 2,
                "full_attention",
            ],
        },
    ),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA_NET),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, {**DELTA_NET, **EXPERTS}),
    "qwen3_5_images": (
        Qwen3_5ForConditionalGeneration,
        in_parts(Qwen3_5Config, QWEN_3_IMAGES),
        {**IN_PARTS, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_images": (
        Qwen3_5MoeForConditionalGeneration,
        in_parts(Qwen3_5MoeConfig, QWEN_3_IMAGES),
        {**IN_PARTS, **EXPERTS},
    ),
}
"""With two heads of values for each of keys, in the cache's bytes of two key-value heads."""
