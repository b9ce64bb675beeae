"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: Mamba-2 and attention, and MLPs or experts without gates.

What the checkpoint counts as a layer is half of one here: Mamba-2 or attention, with the MLP that follows it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..errors import ModelConfigError
from .family import Family, TensorNames
from .family_rules import FULL, no_windows
from .mamba_config import MAMBA, mamba_config
from .mixture_config import MixtureNames
from .mixture_families import CORRECTED

LETTERS = {"M": MAMBA, "*": FULL, "E": "moe", "-": "mlp"}
OTHER_NAMES = {"mamba": MAMBA, "attention": FULL}
TERMS = {
    "mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act",
    "shared_intermediate_size": "moe_shared_expert_intermediate_size",
}  # fmt: skip
"""Keys of other families, by which this one's are known here."""


def kinds_of(config: dict[str, Any]) -> list[str]:
    """What each of the checkpoint's layers is. Raises ModelConfigError."""
    kinds = config.get("layers_block_type") or [*str(config.get("hybrid_override_pattern") or "")]
    kinds = [LETTERS.get(kind, OTHER_NAMES.get(kind, kind)) for kind in kinds]
    if not kinds or not {*kinds} <= {*LETTERS.values()}:
        raise ModelConfigError(
            "config.json: layers_block_type, or hybrid_override_pattern, must name layers, each of "
            f"{', '.join(LETTERS.values())}; found {', '.join(sorted({*kinds})) or 'none'}"
        )
    return kinds


def halves_of(config: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """See ``TensorNames.halves``. Raises ModelConfigError where an MLP has nothing before it, or attention
    none behind it."""
    halves: list[tuple[int, int]] = []
    kinds = kinds_of(config)
    for number, kind in enumerate(kinds):
        if kind in (MAMBA, FULL):
            halves.append((number, -1))
        elif halves and halves[-1] == (number - 1, -1):
            halves[-1] = (number - 1, number)
        else:
            raise ModelConfigError(f"config.json: layer {number}, {kind}, behind no attention is not built")
    for first, second in halves:
        if kinds[first] == FULL and second < 0:
            raise ModelConfigError(f"config.json: layer {first}, attention without an MLP, is not built")
    return tuple(halves)


def nemotron_terms(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("moe_latent_size"):
        raise ModelConfigError("config.json: experts of latent inputs (moe_latent_size) are not built")
    kinds, halves = kinds_of(config), halves_of(config)
    sparse = [second >= 0 and kinds[second] == "moe" for _, second in halves]
    return {
        **config,
        **{usual: config[own] for usual, own in TERMS.items() if own in config},
        "num_hidden_layers": len(halves),
        "layer_types": [kinds[first] for first, _ in halves],
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "enable_moe_block": any(sparse),
        "no_rope_layers": [0] * len(halves),
    }


NEMOTRON = Family(
    o_bias="attention_bias", mlp_bias="mlp_bias", windows=no_windows, terms=nemotron_terms, halves=halves_of,
    recurrent=partial(mamba_config, "mixer"),
    tensors=TensorNames(
        embed="backbone.embeddings", layer="backbone.layers.{}", input_norm="norm", q="mixer.q_proj",
        k="mixer.k_proj", v="mixer.v_proj", o="mixer.o_proj", post_norm="norm", gate="", up="mixer.up_proj",
        down="mixer.down_proj", norm="backbone.norm_f",
        kv_scales=("mixer.{0}_scale", "mixer.{0}_proj.{0}_scale"),
        ignored=(*TensorNames().ignored, "mtp."),
    ),
    mixture=MixtureNames(
        "mixer.gate", "", "mixer.experts.{}.up_proj", "mixer.experts.{}.down_proj",
        shared=("", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
        correction="mixer.gate.e_score_correction_bias",
    ),
    defaults={
        **CORRECTED, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2", "n_groups": 8, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "ssm_state_size": 128, "conv_kernel": 4, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "intermediate_size": 21504,
    },
)  # fmt: skip
