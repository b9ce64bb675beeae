"""Checkpoints of models with layers of Mamba-2: as published, and those that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.model.test_hybrid_checkpoints import error
from engine.model.test_quantised_checkpoints import CASES
from support.families import SMALL
from support.hybrid_families import GRANITE
from support.models import make_checkpoint
from support.quantised_checkpoints import rewrite

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.config import ModelConfig, parse_config
from splitserve.engine.model.model_folder import check_model_folder
from splitserve.engine.model.ranks import check_split
from splitserve.engine.model.tensors import expected_tensors


def parsed(architecture: str, **values: Any) -> ModelConfig:
    return parse_config({"architectures": [architecture], **values}, {})


GRANITE_4 = {
    "num_hidden_layers": 40, "vocab_size": 100352, "mamba_d_head": 64, "mamba_d_state": 128,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "position_embedding_type": "nope", "tie_word_embeddings": True, "num_key_value_heads": 8,
    "num_attention_heads": 32, "max_position_embeddings": 131072, "time_step_limit": [0.0, math.inf],
}  # fmt: skip
GRANITE_4_SIZES: dict[str, tuple[dict[str, Any], float]] = {
    "small": (
        {
            "hidden_size": 4096, "mamba_n_heads": 128, "num_local_experts": 72, "num_experts_per_tok": 10,
            "intermediate_size": 768, "shared_intermediate_size": 1536,
        },
        32.207,
    ),
    "tiny": (
        {
            "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48,
            "num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512,
            "shared_intermediate_size": 1024,
        },
        6.939,
    ),
    "micro": (
        {
            "hidden_size": 2048, "mamba_n_heads": 64, "num_local_experts": 0,
            "intermediate_size": 8192, "shared_intermediate_size": 8192,
        },
        3.191,
    ),
}  # fmt: skip
BAMBA = {"attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128}
NEMOTRON_3_NANO: dict[str, Any] = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "hidden_size": 2688,
    "vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 2, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "mamba_num_heads": 64, "intermediate_size": 1856, "time_step_limit": [0.0, math.inf],
}  # fmt: skip
NEMOTRON_H_8B = {
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "hidden_size": 4096,
    "vocab_size": 131072, "num_attention_heads": 32,
}  # fmt: skip
MAMBA_MODELS = [
    *(("GraniteMoeHybridForCausalLM", {**GRANITE_4, **own}, size) for own, size in GRANITE_4_SIZES.values()),
    ("BambaForCausalLM", BAMBA, 9.778),
    ("NemotronHForCausalLM", NEMOTRON_3_NANO, 31.578),
    ("NemotronHForCausalLM", NEMOTRON_H_8B, 8.101),
]


@pytest.mark.parametrize(("architecture", "values", "billions"), MAMBA_MODELS)
def test_sizes_of_published_models_with_mamba_2(
    architecture: str, values: dict[str, Any], billions: float
) -> None:
    config = parsed(architecture, **values)
    size = sum(math.prod(shape) for shape in expected_tensors(config).values())
    assert size / 1e9 == pytest.approx(billions, abs=0.001)
    assert config.ropes[0].rotary_dim == (64 if values is BAMBA else 0)
    check_split(config, 2, exact=False)


def test_granite_4_without_recurrent_layers() -> None:
    values = {**GRANITE_4, "layer_types": ["attention"] * 40, "position_embedding_type": "rope"}
    config = parsed("GraniteMoeHybridForCausalLM", **{**values, **GRANITE_4_SIZES["micro"][0]})
    assert (config.states, config.mixture, config.ropes[0].rotary_dim) == (None, None, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 5}, "one or more full_attention"),
        ({"time_step_limit": [0.001, 0.1]}, "time steps with a limit"),
        ({"mamba_d_head": 20}, "8 heads of 20 numbers"),
        ({"mamba_d_state": 20}, "multiples of 8"),
        ({"mamba_n_groups": 3}, "8 value heads on 3 key heads"),
        (
            {"hidden_act": "relu2"},
            r"hidden_act 'relu2' is not supported \(supported: silu, gelu_pytorch_tanh\)",
        ),
        ({"residual_multiplier": 0}, "'residual_multiplier' must be a number above 0, found 0"),
        ({"mamba_conv_bias": 1}, "'mamba_conv_bias' must be true or false"),
    ],
)
def test_layers_of_mamba_2_that_are_not_built_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parsed("GraniteMoeHybridForCausalLM", **{**SMALL, **GRANITE, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "ME*"}, "layer 2, attention without an MLP"),
        ({"hybrid_override_pattern": "*-EM"}, "layer 2, moe, behind no attention"),
        (
            {"hybrid_override_pattern": "MX*-"},
            "each of linear_attention, full_attention, moe, mlp; found X, ",
        ),
        ({"hybrid_override_pattern": "MM"}, "one or more full_attention"),
        ({"hybrid_override_pattern": None}, "found none"),
        ({"layers_block_type": "M"}, "'layers_block_type' must be a list"),
        ({"moe_latent_size": 1024}, "experts of latent inputs"),
        ({"mlp_hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"mlp_hidden_act": "silu"}, r"hidden_act 'silu' is not supported \(supported: relu2\)"),
        ({"mamba_num_heads": 0.5}, "'mamba_n_heads' must be a positive whole number"),
    ],
)
def test_nemotrons_that_are_not_built_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parsed("NemotronHForCausalLM", **{**NEMOTRON_3_NANO, **changes})


def test_limits_of_gates_do_not_change_experts_without_gates() -> None:
    """Kernels would read past the end of an expert's weights."""
    values = {**NEMOTRON_3_NANO, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    assert parsed("NemotronHForCausalLM", **values) == parsed("NemotronHForCausalLM", **NEMOTRON_3_NANO)


def test_the_kinds_of_layers_have_three_spellings() -> None:
    kinds = {"M": "mamba", "*": "attention", "E": "moe"}
    names = [kinds[letter] for letter in NEMOTRON_3_NANO["hybrid_override_pattern"]]
    later = [{"mamba": "linear_attention", "attention": "full_attention"}.get(name, name) for name in names]
    found = parsed("NemotronHForCausalLM", **NEMOTRON_3_NANO)
    for layers_block_type in (names, later):
        values = {**NEMOTRON_3_NANO, "layers_block_type": layers_block_type, "hybrid_override_pattern": None}
        assert parsed("NemotronHForCausalLM", **values) == found
    assert (found.num_layers, found.num_cache_layers, found.tensors.halves[2:4]) == (29, 6, ((4, -1), (5, 6)))


@pytest.mark.parametrize("family", ["bamba", "granite_hybrid", "nemotron_h"])
@pytest.mark.parametrize("case", ["compressed-tensors FP8 dynamic", "FP8 in blocks", "ModelOpt FP8"])
def test_quantised_checkpoints(
    family: str, case: str, tmp_path: Path, tried: Callable[[str, str, str], None]
) -> None:
    """Embeddings, convolutions and routers are not quantised."""
    tried(family, "checkpoint", case)
    reference = rewrite(tmp_path, make_checkpoint(tmp_path, family), *CASES[case])
    check_model_folder(tmp_path)
    assert error(tmp_path, reference) < 5e-4
    if case == "compressed-tensors FP8 dynamic":
        assert error(tmp_path, reference, tensor_parallel_size=2) < 5e-4
