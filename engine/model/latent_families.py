"""The families with latent attention beside DeepSeek's own, by the architecture that config.json names."""

from __future__ import annotations

from dataclasses import replace

from .family import Family, TensorNames
from .family_rules import deepseek_scales, indexed_attention
from .mixture_config import MixtureNames
from .mixture_families import DEEPSEEK_3, DEEPSEEK_MIXTURE, MIXTURES

INDEX = {"index_topk": 2048, "index_head_dim": 128}  # layers have an indexer of ``sparse_attention.py``
LATENT: dict[str, Family] = {
    "AXK1ForCausalLM": replace(
        DEEPSEEK_3,
        tensors=replace(
            DEEPSEEK_3.tensors,
            mixture_out_norm="post_mlp_layernorm",
            ignored=(  # dense layers have the norm, and do not use it
                *DEEPSEEK_3.tensors.ignored, ".post_mlp_layernorm.weight", ".gate.e_score_correction_bias",
            ),
        ),
        mixture=replace(DEEPSEEK_MIXTURE, may_lack_correction=True),
        defaults={**DEEPSEEK_3.defaults, "first_k_dense_replace": 1},
    ),
    "DeepseekV32ForCausalLM": replace(
        MIXTURES["DeepseekV3ForCausalLM"],
        windows=indexed_attention,
        defaults={**DEEPSEEK_3.defaults, **INDEX, "index_n_heads": 64},
    ),
    "Glm4MoeLiteForCausalLM": replace(
        MIXTURES["DeepseekV3ForCausalLM"],
        defaults={
            **DEEPSEEK_3.defaults, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
        },
    ),
    "GlmMoeDsaForCausalLM": replace(
        MIXTURES["DeepseekV3ForCausalLM"],
        windows=indexed_attention,
        defaults={
            **DEEPSEEK_3.defaults, **INDEX, "index_n_heads": 32, "indexer_rope_interleave": True,
            "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
        },
    ),
    "Mistral4ForCausalLM": replace(
        DEEPSEEK_3,
        mixture=MixtureNames(
            "mlp.gate", "mlp.experts.gate_up_proj", "", "mlp.experts.down_proj", stacked=True,
            shared=DEEPSEEK_MIXTURE.shared,
        ),
        defaults={
            "norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "softmax", "n_group": 1,
            "topk_group": 1, "n_shared_experts": 1,
        },
    ),
    "YoutuForCausalLM": Family(
        o_bias="attention_bias", latent=True, interleaved_rope=True, scales=deepseek_scales,
        tensors=TensorNames(q="", k="", v=""), defaults={"tie_word_embeddings": True},
    ),
}  # fmt: skip
