"""The small checkpoints of Gemma 4."""

from __future__ import annotations

from typing import Any

from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4TextConfig

from .mixture_families import Families

DENSE = {  # layers of full attention have fewer and larger heads, and use half of their part of a block
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 24,
    "final_logit_softcapping": 60.0,
    "tie_word_embeddings": False,  # tied, the last token is the likeliest next one
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
}
MIXTURE = {
    **DENSE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_k_eq_v": False,  # values have weights of their own, and all layers as many heads
    "global_head_dim": 16,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}


def in_parts(**text: Any) -> Gemma4Config:
    """With the smallest part for images."""
    images = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 16,
    }
    return Gemma4Config(text_config=text, vision_config=images, audio_config=None)


GEMMA_4: Families = {
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig, DENSE),
    "gemma4_moe": (Gemma4ForCausalLM, Gemma4TextConfig, MIXTURE),
    "gemma4_in_parts": (Gemma4ForConditionalGeneration, in_parts, {**DENSE, "pad_token_id": 0}),
}
