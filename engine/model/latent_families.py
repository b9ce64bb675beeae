"""The families with latent attention beside DeepSeek's own, by the architecture that config.json names."""

from __future__ import annotations

from dataclasses import replace

from .family import Family, TensorNames
from .family_rules import deepseek_scales
from .mixture_families import DEEPSEEK_3

LATENT: dict[str, Family] = {
    "Glm4MoeLiteForCausalLM": replace(
        DEEPSEEK_3,
        defaults={
            **DEEPSEEK_3.defaults, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
        },
    ),
    "YoutuForCausalLM": Family(
        o_bias="attention_bias", latent=True, interleaved_rope=True, scales=deepseek_scales,
        tensors=TensorNames(q="", k="", v=""), defaults={"tie_word_embeddings": True},
    ),
}  # fmt: skip
