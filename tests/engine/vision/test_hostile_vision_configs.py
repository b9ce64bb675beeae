"""Whatever stands in vision_config and in the processor's file: a tower, or text alone; no exception, and no
memory for what is only claimed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.vision_models import make_vision_checkpoint

from splitserve.engine.vision.config import VisionConfig, vision_config

FAMILIES = ("glm4v", "internvl", "kimi_k25", "mistral3", "qwen2_5_vl", "qwen3_vl")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
BESIDE = [
    "vision_config",
    "vision_feature_layer",
    "spatial_merge_size",
    "projector_hidden_act",
    "downsample_ratio",
    "projection_layer_norm_eps",
]
OPTIONS = ["image_mean", "image_std", "rescale_factor", "do_normalize", "do_rescale", "patch_size"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in found.items():
        make_vision_checkpoint(folder, family)
        (folder / "model.safetensors").unlink()  # no shape that would be compared
    return found


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), family=st.sampled_from(FAMILIES))
def test_any_value_is_a_tower_or_none(folders: dict[str, Path], data: st.DataObject, family: str) -> None:
    config: dict[str, Any] = json.loads((folders[family] / "config.json").read_text())
    part = data.draw(st.sampled_from([config["vision_config"], config]))
    key = data.draw(st.sampled_from(BESIDE if part is config else sorted(part)))
    part[key] = data.draw(VALUES)
    options = data.draw(st.dictionaries(st.sampled_from(OPTIONS), VALUES, max_size=1))
    (folders[family] / "preprocessor_config.json").write_text(json.dumps(options))
    found = vision_config(folders[family], config)
    assert found is None or isinstance(found, VisionConfig)
    if found is not None:
        assert found.num_bytes(1) > 0
