"""The small checkpoints that are nearly Llama's."""

from __future__ import annotations

from transformers import (
    CwmConfig,
    CwmForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    InternLM3Config,
    IQuestCoderConfig,
    LlamaForCausalLM,
)

from .mixture_families import Families

HYPERCLOVAX = {  # norms of outputs have an eps that counts, and that dividing the residual must not change
    "head_dim": 24,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.125,
    "rms_norm_eps": 1.0,
}


class IQuestCoderForCausalLM(LlamaForCausalLM):
    """Transformers has no class of this name, and computes it as Llama."""

    config_class = IQuestCoderConfig


class InternLM3ForCausalLM(LlamaForCausalLM):
    """Computed as Llama, too."""

    config_class = InternLM3Config


LLAMA_LIKE: Families = {
    "cwm": (
        CwmForCausalLM,
        CwmConfig,
        {
            "head_dim": 24,
            "mlp_bias": True,
            "num_hidden_layers": 5,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "hyperclovax": (HyperCLOVAXForCausalLM, HyperCLOVAXConfig, HYPERCLOVAX),
    "hyperclovax_no_post_norms": (
        HyperCLOVAXForCausalLM,
        HyperCLOVAXConfig,
        {"use_post_norm": False, "attention_bias": True, "mlp_bias": True, "logits_scaling": 2.0},
    ),
    "internlm3": (
        InternLM3ForCausalLM,
        InternLM3Config,
        {
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
        },
    ),
    "iquestcoder": (IQuestCoderForCausalLM, IQuestCoderConfig, {"head_dim": 24, "tie_word_embeddings": True}),
}
