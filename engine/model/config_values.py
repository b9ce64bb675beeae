"""Values of a config.json, checked. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...kernels.mixture_shape import Activation, num_inputs
from ..errors import ModelConfigError

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu_squared",
}  # fmt: skip
LARGEST = {
    "vocab_size": 1 << 24, "hidden_size": 1 << 20, "intermediate_size": 1 << 22,
    "num_hidden_layers": 1024, "num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 1024,
    "max_position_embeddings": 1 << 24, "sliding_window": 1 << 24, "num_experts": 1 << 14,
    "num_local_experts": 1 << 14, "num_experts_per_tok": 1 << 10, "n_routed_experts": 1 << 14,
    "n_group": 1 << 14, "topk_group": 1 << 14, "moe_intermediate_size": 1 << 22,
    "shared_expert_intermediate_size": 1 << 22, "shared_intermediate_size": 1 << 22, "rotary_dim": 1024,
    "num_nextn_predict_layers": 1024, "num_mtp_modules": 1024, "decoder_sparse_step": 1024,
    "q_lora_rank": 1 << 17, "kv_lora_rank": 1 << 13, "qk_nope_head_dim": 1024, "qk_rope_head_dim": 1024,
    "v_head_dim": 1024, "linear_num_key_heads": 4096, "linear_num_value_heads": 4096,
    "linear_key_head_dim": 1024, "linear_value_head_dim": 1024, "linear_conv_kernel_dim": 64,
    "full_attention_interval": 1024, "conv_L_cache": 64, "block_multiple_of": 1 << 22,
    "block_ff_dim": 1 << 22, "depth": 1024, "num_heads": 4096, "patch_size": 256, "temporal_patch_size": 16,
    "spatial_merge_size": 16, "out_hidden_size": 1 << 20, "window_size": 1 << 16,
    "num_position_embeddings": 1 << 20, "mamba_n_heads": 4096, "mamba_n_groups": 4096, "mamba_d_head": 1024,
    "mamba_d_state": 1024, "mamba_d_conv": 64, "mamba_expand": 64,
    "index_topk": 1 << 20, "index_head_dim": 1024, "index_n_heads": 4096, "index_topk_freq": 1024,
    "pos_emb_height": 1 << 10, "pos_emb_width": 1 << 10,
    "image_size": 1 << 16,
}  # fmt: skip
"""Several times those of any model: what a config.json claims is believed no further, before its weights bear
it out."""
MOST = 1e12
NEVER_NULL = (
    "rms_norm_eps", "layer_norm_eps", "query_pre_attn_scalar", "embedding_multiplier", "residual_multiplier",
    "logits_scaling", "logit_scale", "routed_scaling_factor", "first_k_dense_replace",
    "router_scaling_factor", "norm_eps",
)  # fmt: skip
NUMBERS = (
    *NEVER_NULL, "attn_logit_softcapping", "final_logit_softcapping", "n_shared_experts", "max_window_layers",
    "num_shared_experts", "moe_num_shared_experts", "attention_multiplier",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "partial_rotary_factor",
    "low_freq_factor", "high_freq_factor", "llama_4_scaling_beta", "alpha",
    "block_ffn_dim_multiplier", "num_dense_layers", "index_skip_topk_offset",
)  # fmt: skip
FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm", "norm_topk_prob",
    "rope_interleave", "use_sliding_window", "is_causal", "truncate", "attention_out_bias", "use_bias",
    "conv_bias", "block_auto_adjust_ff_dim", "tie_embedding", "use_expert_bias", "linear_allow_neg_eigval",
    "mamba_conv_bias", "mamba_proj_bias", "indexer_rope_interleave",
)  # fmt: skip
LISTS = (
    "layer_types",
    "no_rope_layers",
    "mlp_only_layers",
    "mlp_layer_types",
    "short_factor",
    "long_factor",
    "layer_rope_theta",
    "full_attn_idxs",
    "attn_layer_indices",
    "layers_block_type",
    "indexer_types",
)
PARTS = ("text_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention")
KINDS: dict[str, tuple[str, type[Any]]] = {
    **dict.fromkeys(NUMBERS, (f"a number from 0 to {MOST:g}", float)),
    **dict.fromkeys(FLAGS, ("true or false", bool)),
    **dict.fromkeys(LISTS, ("a list", list)),
    **dict.fromkeys(PARTS, ("an object", dict)),
}


def check_kinds(config: dict[str, Any]) -> None:
    """Raises ModelConfigError where a value is not of its key's kind; also within ``PARTS``."""
    for key in config.keys() & KINDS.keys():
        value, (kind, of) = config[key], KINDS[key]
        fits = (
            type(value) is of
            or (of is float and type(value) is int)
            or (value is None and key not in NEVER_NULL)
        )
        if not fits or (of is float and value is not None and not 0 <= value < MOST):
            raise ModelConfigError(f"config.json: {key!r} must be {kind}, found {value!r:.100}")
        if of is dict and value:
            check_kinds(value)


def positive_int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Raises ModelConfigError where the value is no whole number from 1 to ``LARGEST``. ``default``: where
    there is none."""
    value = config.get(key) if default is None else config.get(key) or default
    if type(value) is not int or value < 1:
        raise ModelConfigError(f"config.json: {key!r} must be a positive whole number, found {value!r:.100}")
    if value > LARGEST[key]:
        raise ModelConfigError(
            f"config.json: {key!r} is {value}; the largest that is served is {LARGEST[key]}"
        )
    return value


def activation_of(config: dict[str, Any], gated: bool) -> Activation:
    """``gated``: the family's MLPs have gates. Raises ModelConfigError."""
    known = {name: of for name, of in ACTIVATIONS.items() if num_inputs(of) == 1 + gated}
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if name not in [*known]:
        raise ModelConfigError(
            f"config.json: hidden_act {name!r:.100} is not supported (supported: {', '.join(known)})"
        )
    return known[name]


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelConfigError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path} does not exist; give the folder of a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} is not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} must hold a JSON object")
    return value
