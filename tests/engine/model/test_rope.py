"""Rotary parameters beyond what the comparison with transformers covers."""

from __future__ import annotations

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
