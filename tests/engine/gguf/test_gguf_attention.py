"""Windows and rotary frequencies of a GGUF file, by its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gguf_checkpoints import write_gguf
from support.models import make_checkpoint

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.gguf.folder import write_folder
from splitserve.engine.model.config import ModelConfig
from splitserve.engine.model.model_folder import check_model_folder

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


def config_of(folder: Path, family: str = "llama2", architecture: str = "llama", **keys: Any) -> ModelConfig:
    model = make_checkpoint(folder, family)
    write_gguf(folder / "a.gguf", model, architecture, lambda name: "Q8_0", **keys)
    (out := folder / "out").mkdir()
    write_folder(folder / "a.gguf", out)
    return check_model_folder(out)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("default", 1.0, 1.0)),
        ({"rope.scaling.factor": 4.0}, ("linear", 4.0, 1.0)),
        ({"rope.scale_linear": 4.0}, ("linear", 4.0, 1.0)),
        ({"rope.scaling.type": "linear"}, ("default", 1.0, 1.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ("default", 1.0, 1.0)),
        (YARN, ("yarn", 4.0, 1.1386)),
        ({**YARN, "rope.scaling.attn_factor": 1.5}, ("yarn", 4.0, 1.5 * 1.1386)),
        ({**YARN, "rope.scaling.yarn_attn_factor": 1.5}, ("yarn", 4.0, 1.5)),
        ({**YARN, "rope.scaling.yarn_attn_factor": 1.0}, ("yarn", 4.0, 1.1386)),
    ],
)
def test_frequencies_are_scaled_as_in_llama_cpp(
    tmp_path: Path, keys: dict[str, Any], expected: tuple[str, float, float]
) -> None:
    """One difference: llama.cpp ignores ``yarn_attn_factor``, transformers' ``attention_factor``."""
    rope = config_of(tmp_path, **keys).ropes[0]
    assert rope.type == expected[0]
    assert (rope.factor, rope.attention_factor) == pytest.approx(expected[1:], abs=1e-4)


def test_gemma_3_has_no_windows_without_the_key(tmp_path: Path) -> None:
    """Rnj-1 has none; it got windows of 4,096 tokens, and other frequencies in these layers."""
    config = config_of(tmp_path, "gemma3", "gemma3")
    assert config.sliding_windows == (None, None, None)
    assert len(set(config.ropes)) == 1


@pytest.mark.parametrize("key", ["embedding_length", "attention.head_count", "rope.scaling.factor"])
@pytest.mark.parametrize("value", ["x", 0, [0, 1]])
def test_a_value_of_the_wrong_type_is_refused_in_words(tmp_path: Path, key: str, value: Any) -> None:
    if (key, value) == ("rope.scaling.factor", 0):
        return  # as in llama.cpp: none
    with pytest.raises(ModelConfigError):
        config_of(tmp_path, **{key: value})


def test_a_model_of_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="attention to later tokens"):
        config_of(tmp_path, **{"attention.causal": False})
