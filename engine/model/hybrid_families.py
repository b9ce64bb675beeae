"""The families in which most layers have linear attention (gated delta nets), by the architecture that
config.json names."""

from __future__ import annotations

from dataclasses import replace

from .family import Family, TensorNames
from .family_rules import no_windows
from .mixture_families import QWEN_MIXTURE_SHARED
from .wrapped_families import part_of

DEFAULTS = {
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN_3_5 = Family(
    o_bias="attention_bias", unit_norms=True, qk_norm="head", output_gate=True, windows=no_windows,
    delta_net=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    tensors=TensorNames(ignored=(*TensorNames().ignored, "mtp.")),
    defaults={**DEFAULTS, "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288},
)  # fmt: skip
QWEN_3_5_MIXTURE = replace(
    QWEN_MIXTURE_SHARED,
    gate="mlp.experts.gate_up_proj", up="", down="mlp.experts.down_proj", stacked=True,
    apart=QWEN_MIXTURE_SHARED,
)  # fmt: skip
QWEN_3_5_MOE = replace(
    QWEN_3_5,
    mixture=QWEN_3_5_MIXTURE,
    defaults={
        **DEFAULTS, "vocab_size": 248320, "hidden_size": 2048, "num_key_value_heads": 2, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,  # of no layer
    },
)  # fmt: skip
HYBRID: dict[str, Family] = {
    "Qwen3NextForCausalLM": replace(
        QWEN_3_5,
        delta_net=("in_proj_qkvz", "in_proj_ba"),
        mixture=QWEN_MIXTURE_SHARED,
        defaults={
            **DEFAULTS, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
            "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
    "Qwen3_5ForCausalLM": QWEN_3_5,
    "Qwen3_5ForConditionalGeneration": part_of(
        QWEN_3_5, "model.language_model", "lm_head", ("model.visual.",)
    ),
    "Qwen3_5MoeForCausalLM": QWEN_3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": part_of(
        QWEN_3_5_MOE, "model.language_model", "lm_head", ("model.visual.",)
    ),
}  # fmt: skip
