"""Rotary parameters beyond what the comparison with transformers covers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.config import ModelConfig, parse_config

PHI = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


def phi(**changes: Any) -> ModelConfig:
    return parse_config({**PHI, **changes}, {})


def test_longrope_takes_the_factors_of_the_length_that_is_served() -> None:
    """One choice for all sequences: a cached key must not depend on the sequence that made it."""
    config = phi()
    assert config.ropes[0].attention_factor == pytest.approx(1.1902380714)  # as Phi-3's authors give it
    assert config.for_length(4097).ropes[0].long_factors == (2.0,) * 8
    assert config.for_length(4096).ropes[0].long_factors == (1.0,) * 8


def test_longrope_needs_a_factor_for_each_pair() -> None:
    with pytest.raises(ModelConfigError, match=r"needs 6 factors .* found 8 and 8"):
        phi(partial_rotary_factor=0.75)


def test_longrope_stretches_by_its_factor_where_one_is_given() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = phi(rope_scaling={"type": "longrope", "factor": 4.0, **factors})
    assert config.ropes[0].attention_factor == pytest.approx((1 + math.log(4) / math.log(4096)) ** 0.5)


def test_rope_scaling_that_was_added_to_a_file_of_transformers_5_is_honoured() -> None:
    """It was ignored, though models' cards ask to add it."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = phi(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=yarn)
    rope = config.ropes[0]
    assert (rope.type, rope.theta, rope.factor) == ("yarn", 1e6, 4.0)


def test_the_original_length_may_stand_outside_of_the_rope_parameters() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert phi(rope_scaling=yarn).ropes[0].original_max_position_embeddings == 4096
    with pytest.raises(ModelConfigError, match=r"'original_max_position_embeddings' .* must be above 0"):
        phi(rope_scaling=yarn, original_max_position_embeddings=-1)


def test_the_rotated_share_among_the_rope_parameters_comes_first() -> None:
    both = {"partial_rotary_factor": 1.0, "rope_scaling": None}
    config = phi(**both, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    assert config.ropes[0].rotary_dim == 8


@pytest.mark.parametrize(
    ("family", "changes", "theta", "rotated"),
    [
        ("Glm4ForCausalLM", {"head_dim": 16}, 1e4, 8),
        ("MixtralForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 1}, 1e6, 16),
        ("GptOssForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}, 15e4, 16),
        ("SmolLM3ForCausalLM", {}, 2e6, 16),
    ],
)
def test_what_a_file_leaves_out_is_as_transformers_has_it(
    family: str, changes: dict[str, Any], theta: float, rotated: int
) -> None:
    rope = phi(architectures=[family], rope_scaling=None, **changes).ropes[0]
    assert (rope.theta, rope.rotary_dim) == (theta, rotated)


def test_half_a_pair_cannot_be_rotated() -> None:
    with pytest.raises(ModelConfigError, match=r"partial_rotary_factor 0.1 must leave an even number"):
        phi(partial_rotary_factor=0.1)


def test_layers_without_rope_are_those_of_the_list_or_each_fourth() -> None:
    smol = {**PHI, "architectures": ["SmolLM3ForCausalLM"], "rope_scaling": None, "num_hidden_layers": 5}
    assert [rope.rotary_dim for rope in parse_config(smol, {}).ropes] == [16, 16, 16, 0, 16]
    named = parse_config({**smol, "no_rope_layers": [0, 1, 1, 1, 1]}, {})
    assert [rope.rotary_dim for rope in named.ropes] == [0, 16, 16, 16, 16]
    with pytest.raises(ModelConfigError, match="must have 5 entries"):
        parse_config({**smol, "no_rope_layers": [0]}, {})


def test_gemma_files_of_before_transformers_5_are_read() -> None:
    gemma = {
        **PHI,
        "architectures": ["Gemma3ForCausalLM"],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
    }
    config = parse_config(gemma, {})
    assert config.sliding_windows == (512, None)
    assert [(rope.theta, rope.factor) for rope in config.ropes] == [(1e4, 1.0), (1e6, 8.0)]
    assert config.tie_word_embeddings
