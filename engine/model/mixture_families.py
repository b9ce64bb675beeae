"""The families with mixtures of experts, by the architecture that config.json names."""

from __future__ import annotations

from dataclasses import replace

from .family import Family, PredictionNames, TensorNames
from .family_rules import (
    deepseek_scales,
    granite_scales,
    same_window,
    window_if_used,
    windows_by_layer,
    windows_by_pattern,
)
from .mixture_config import MixtureNames

QWEN_MIXTURE = MixtureNames(
    "mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"
)
DEEPSEEK_MIXTURE = replace(
    QWEN_MIXTURE, correction="mlp.gate.e_score_correction_bias",
    shared=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
)  # fmt: skip
DEEPSEEK_2 = Family(
    o_bias="attention_bias", latent=True, interleaved_rope=True, scales=deepseek_scales,
    tensors=TensorNames(q="", k="", v=""), mixture=DEEPSEEK_MIXTURE,
    defaults={"norm_topk_prob": False, "topk_method": "greedy", "scoring_func": "softmax"},
)  # fmt: skip
DEEPSEEK_3 = replace(
    DEEPSEEK_2,
    defaults={
        "norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    },
)  # fmt: skip
CORRECTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1}
EXAONE = Family(
    qkv_bias=False, qk_norm="head", windows=windows_by_pattern, windows_only_rope="sliding_window",
    tensors=TensorNames(ignored=(*TensorNames().ignored, "mtp.")),
    mixture=replace(DEEPSEEK_MIXTURE, correction="mlp.e_score_correction_bias"),
    defaults={
        **CORRECTED, "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        "sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip
GRANITE_MIXTURE = MixtureNames(
    "block_sparse_moe.router.layer", "block_sparse_moe.input_linear.weight", "",
    "block_sparse_moe.output_linear.weight", stacked=True,
)  # fmt: skip
GRANITE_SHARED = ("shared_mlp.input_linear", "", "shared_mlp.output_linear")
GRANITE = Family(o_bias="attention_bias", scales=granite_scales, mixture=GRANITE_MIXTURE)
QWEN_MIXTURE_SHARED = replace(
    QWEN_MIXTURE,
    shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    shared_gate="mlp.shared_expert_gate",
)
MIXTRAL_MIXTURE = MixtureNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)  # fmt: skip
MIXTURES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": DEEPSEEK_2,
    "DeepseekV3ForCausalLM": replace(
        DEEPSEEK_3, tensors=replace(DEEPSEEK_3.tensors, prediction=PredictionNames())
    ),
    "Dots1ForCausalLM": Family(
        o_bias="attention_bias", qk_norm="head", windows=windows_by_layer, mixture=DEEPSEEK_MIXTURE,
        defaults={
            **CORRECTED, "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 4096,
            "max_window_layers": 62,
        },
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", interleaved_rope=True,
        tensors=TensorNames(
            ignored=(
                *TensorNames().ignored, "model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.",
                "model.mtp_linear_proj.",
            ),
            prediction=PredictionNames(  # as Baidu's FastDeploy runs it: the norm is the model's own
                "model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0",
                "model.mtp_linear_proj.0", "model.norm", head="", embed="", dense=True,
            ),
        ),
        mixture=replace(
            DEEPSEEK_MIXTURE, correction="mlp.moe_statics.e_score_correction_bias", in_a_row=True
        ),
        defaults={
            **CORRECTED, "scoring_func": "softmax", "moe_k": 6, "moe_num_experts": 64, "rms_norm_eps": 1e-5,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "tie_word_embeddings": True,
            "rope_theta": 5e5,
        },
    ),
    "ExaoneMoEForCausalLM": EXAONE,  # the name by which vLLM serves K-EXAONE
    "ExaoneMoeForCausalLM": EXAONE,
    "Glm4MoeForCausalLM": Family(
        qk_norm="head", mixture=DEEPSEEK_MIXTURE, tensors=TensorNames(prediction=PredictionNames()),
        defaults={
            **CORRECTED, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": False,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1,
        },
    ),
    "GptOssForCausalLM": Family(
        o_bias="attention_bias", windows=windows_by_pattern, tensors=TensorNames(sinks="self_attn.sinks"),
        mixture=MixtureNames("mlp.router", "mlp.experts.gate_up_proj", "", "mlp.experts.down_proj"),
        defaults={
            "attention_bias": True, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
            "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_theta": 150000.0, "rms_norm_eps": 1e-5,
        },
    ),
    "GraniteMoeForCausalLM": GRANITE,
    "GraniteMoeSharedForCausalLM": replace(
        GRANITE,
        mixture=replace(GRANITE_MIXTURE, shared=GRANITE_SHARED),
    ),
    "HYV3ForCausalLM": Family(
        o_bias="attention_bias", qk_norm="head",
        mixture=replace(
            QWEN_MIXTURE, router="mlp.router.gate", correction="mlp.expert_bias",
            shared=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"),
        ),
        defaults={
            **CORRECTED, "num_shared_experts": 1, "first_k_dense_replace": 1, "router_scaling_factor": 2.826,
            "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0,
        },
    ),
    "MellumForCausalLM": Family(
        o_bias="attention_bias", qk_norm="head", mixture=QWEN_MIXTURE,
        tensors=TensorNames(ignored=(*TensorNames().ignored, "mtp.")),
        defaults={
            "head_dim": 128, "sliding_window": 1024, "rope_theta": 5e5, "rope_local_base_freq": 1e4,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        qkv_bias=False, qk_norm="all",
        mixture=replace(MIXTRAL_MIXTURE, correction="block_sparse_moe.e_score_correction_bias"),
        defaults={**CORRECTED, "head_dim": 128, "rope_theta": 5e6},
    ),
    "MixtralForCausalLM": Family(
        windows=same_window, defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
        mixture=MIXTRAL_MIXTURE,
    ),
    "OlmoeForCausalLM": Family(
        o_bias="attention_bias", qk_norm="all", mixture=QWEN_MIXTURE,
        defaults={"norm_topk_prob": False, "rms_norm_eps": 1e-5},
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias="qkv_bias", windows=windows_by_layer, mixture=QWEN_MIXTURE_SHARED,
        defaults={"norm_topk_prob": False, "qkv_bias": True, "sliding_window": 4096},
    ),
    "Qwen3MoeForCausalLM": Family(
        o_bias="attention_bias", qk_norm="head", windows=window_if_used, mixture=QWEN_MIXTURE,
        defaults={"norm_topk_prob": False, "sliding_window": 4096},
    ),
    "SolarOpenForCausalLM": Family(
        mixture=DEEPSEEK_MIXTURE,
        defaults={
            **CORRECTED, "n_shared_experts": 1, "intermediate_size": 1280, "head_dim": 128,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        },
    ),
}  # fmt: skip
