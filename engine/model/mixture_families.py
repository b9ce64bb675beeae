"""The families with mixtures of experts, by the architecture that config.json names."""

from __future__ import annotations

from dataclasses import replace

from .family import Family, TensorNames
from .family_rules import deepseek_scales, same_window, window_if_used, windows_by_layer, windows_by_pattern
from .mixture_config import MixtureNames

QWEN_MIXTURE = MixtureNames(
    "mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"
)
DEEPSEEK_2 = Family(
    o_bias="attention_bias", latent=True, interleaved_rope=True, scales=deepseek_scales,
    tensors=TensorNames(q="", k="", v=""),
    mixture=replace(
        QWEN_MIXTURE, correction="mlp.gate.e_score_correction_bias",
        shared=(
            "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"
        ),
    ),
    defaults={"norm_topk_prob": False, "topk_method": "greedy", "scoring_func": "softmax"},
)  # fmt: skip
DEEPSEEK_3 = replace(
    DEEPSEEK_2,
    defaults={
        "norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    },
)  # fmt: skip
QWEN_MIXTURE_SHARED = replace(
    QWEN_MIXTURE,
    shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    shared_gate="mlp.shared_expert_gate",
)
MIXTURES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": DEEPSEEK_2,
    "DeepseekV3ForCausalLM": DEEPSEEK_3,
    "GptOssForCausalLM": Family(
        o_bias="attention_bias", windows=windows_by_pattern, tensors=TensorNames(sinks="self_attn.sinks"),
        mixture=MixtureNames("mlp.router", "mlp.experts.gate_up_proj", "", "mlp.experts.down_proj"),
        defaults={
            "attention_bias": True, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
            "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_theta": 150000.0, "rms_norm_eps": 1e-5,
        },
    ),
    "MixtralForCausalLM": Family(
        windows=same_window, defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
        mixture=MixtureNames(
            "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2",
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias="qkv_bias", windows=windows_by_layer, mixture=QWEN_MIXTURE_SHARED,
        defaults={"norm_topk_prob": False, "qkv_bias": True, "sliding_window": 4096},
    ),
    "Qwen3MoeForCausalLM": Family(
        o_bias="attention_bias", qk_norm="head", windows=window_if_used, mixture=QWEN_MIXTURE,
        defaults={"norm_topk_prob": False, "sliding_window": 4096},
    ),
}  # fmt: skip
