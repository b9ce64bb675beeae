"""The families in which most layers are recurrent (gated delta nets, Mamba-2, short convolutions), by the
architecture that config.json names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from .config_values import positive_int
from .delta_net_config import DeltaNetNames, delta_net_config
from .family import Family, TensorNames
from .family_rules import FULL, granite_scales, no_windows
from .mamba_config import MAMBA, mamba_config
from .mixture_config import MixtureNames
from .mixture_families import CORRECTED, GRANITE_MIXTURE, GRANITE_SHARED, QWEN_MIXTURE_SHARED
from .nemotron_family import NEMOTRON
from .short_conv_config import CONV, short_conv_config
from .wrapped_families import part_of

DEFAULTS = {
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN_3_5 = Family(
    o_bias="attention_bias", unit_norms=True, qk_norm="head", output_gate=True, windows=no_windows,
    recurrent=partial(
        delta_net_config, DeltaNetNames(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
    ),
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


def olmo_hybrid_terms(config: dict[str, Any]) -> dict[str, Any]:
    """Heads of delta nets have sizes that follow from others. Where the theta is null there is no rope."""
    heads, rope = positive_int(config, "num_attention_heads"), config.get("rope_parameters") or {}
    num_keys = positive_int(config, "linear_num_key_heads", heads)
    key_dim = positive_int(
        config, "linear_key_head_dim", int(0.75 * positive_int(config, "hidden_size") / num_keys)
    )
    found = {
        **config,
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": positive_int(config, "linear_num_value_heads", heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": positive_int(config, "linear_value_head_dim", 2 * key_dim),
    }
    if rope.get("rope_theta", config.get("rope_theta", 1e4)) is not None:
        return found
    no_rope = [0] * positive_int(config, "num_hidden_layers")
    return {**found, "rope_parameters": None, "rope_theta": 1.0, "no_rope_layers": no_rope}


def lfm2_terms(config: dict[str, Any]) -> dict[str, Any]:
    found = {**config, "rms_norm_eps": config["norm_eps"]}
    if config.get("tie_embedding") is not None:
        found["tie_word_embeddings"] = config["tie_embedding"]
    if not config.get("layer_types"):
        num_layers = positive_int(config, "num_hidden_layers")
        full = config.get("full_attn_idxs") or range(num_layers)
        found["layer_types"] = [FULL if i in full else CONV for i in range(num_layers)]
    return found


def lfm2_dense_terms(config: dict[str, Any]) -> dict[str, Any]:
    """MLPs have two thirds of the columns that config.json names, rounded up, unless it asks for all."""
    size = positive_int(config, "block_ff_dim", positive_int(config, "intermediate_size"))
    if config["block_auto_adjust_ff_dim"]:
        size = 2 * size // 3
        if (factor := config["block_ffn_dim_multiplier"]) is not None:
            multiple = positive_int(config, "block_multiple_of")
            size = -(-int(factor * size) // multiple) * multiple
    return {**lfm2_terms(config), "intermediate_size": size}


def lfm2_mixture_terms(config: dict[str, Any]) -> dict[str, Any]:
    method = CORRECTED["topk_method"] if config["use_expert_bias"] else "greedy"
    return {
        **lfm2_terms(config), "first_k_dense_replace": config["num_dense_layers"], "topk_method": method,
    }  # fmt: skip


def granite_hybrid_terms(config: dict[str, Any]) -> dict[str, Any]:
    """Without experts all MLPs are dense. Rope is left out unless config.json asks for it."""
    kinds = {"mamba": MAMBA, "attention": FULL}
    layer_types = config.get("layer_types") or [MAMBA] * positive_int(config, "num_hidden_layers")
    found = {**config, "layer_types": [kinds.get(kind, kind) for kind in layer_types]}
    if not config.get("num_local_experts"):
        found |= {"enable_moe_block": False, "intermediate_size": config.get("shared_intermediate_size")}
    if config.get("position_embedding_type") != "rope":
        found["no_rope_layers"] = [0] * positive_int(config, "num_hidden_layers")
    return found


def bamba_terms(config: dict[str, Any]) -> dict[str, Any]:
    full = config.get("attn_layer_indices") or []
    layers = range(positive_int(config, "num_hidden_layers"))
    return {**config, "layer_types": [FULL if i in full else MAMBA for i in layers]}


OLMO_DELTA_NET = DeltaNetNames(
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), ("q_conv1d", "k_conv1d", "v_conv1d"),
    "o_norm", "o_proj", 1e-5,
)  # fmt: skip
LFM2 = Family(
    qkv_bias=False, qk_norm="head", windows=no_windows, recurrent=short_conv_config, terms=lfm2_dense_terms,
    tensors=TensorNames(
        input_norm="operator_norm", q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm",
        o="self_attn.out_proj", post_norm="ffn_norm", gate="feed_forward.w1", up="feed_forward.w3",
        down="feed_forward.w2", norm="model.embedding_norm",
    ),
    defaults={
        "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
        "norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e6, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    },
)  # fmt: skip
HYBRID: dict[str, Family] = {
    "BambaForCausalLM": Family(
        o_bias="attention_bias", mlp_bias="mlp_bias", windows=no_windows, terms=bamba_terms,
        recurrent=partial(mamba_config, "mamba"),
        tensors=TensorNames(
            post_norm="pre_ff_layernorm", gate="feed_forward.gate_proj", up="feed_forward.up_proj",
            down="feed_forward.down_proj", norm="model.final_layernorm",
        ),
        defaults={
            "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144, "partial_rotary_factor": 0.5,
        },
    ),
    "GraniteMoeHybridForCausalLM": Family(
        o_bias="attention_bias", scales=granite_scales, windows=no_windows, terms=granite_hybrid_terms,
        recurrent=partial(mamba_config, "mamba"),
        tensors=TensorNames(gate=GRANITE_SHARED[0], up="", down=GRANITE_SHARED[2]),
        mixture=replace(GRANITE_MIXTURE, shared=GRANITE_SHARED),
        defaults={"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": replace(
        LFM2,
        terms=lfm2_mixture_terms,
        mixture=MixtureNames(
            "feed_forward.gate", "feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3",
            "feed_forward.experts.{}.w2", correction="feed_forward.expert_bias",
        ),
        defaults={
            **LFM2.defaults, **CORRECTED, "hidden_size": 2048, "intermediate_size": 7168,
            "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4,
            "num_dense_layers": 2, "use_expert_bias": True,
        },
    ),
    "NemotronHForCausalLM": NEMOTRON,
    "OlmoHybridForCausalLM": Family(
        o_bias="attention_bias", qk_norm="all", windows=no_windows, terms=olmo_hybrid_terms,
        recurrent=partial(delta_net_config, OLMO_DELTA_NET),
        tensors=TensorNames(
            input_norm="", attention_out_norm="post_attention_layernorm", post_norm="",
            mlp_out_norm="post_feedforward_layernorm",
            recurrent=TensorNames(),
        ),
        defaults={
            "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 30, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
            "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
        },
    ),
    "Qwen3NextForCausalLM": replace(
        QWEN_3_5,
        recurrent=partial(delta_net_config, DeltaNetNames(("in_proj_qkvz", "in_proj_ba"))),
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
