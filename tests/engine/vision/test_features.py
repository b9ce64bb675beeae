"""An image's features are those of transformers, for each family of vision towers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vision_models import (
    MORE,
    PATCH_SIZE,
    TILE,
    make_vision_checkpoint,
    processed,
    random_image,
    their_features,
    write_processor,
)
from torch import Tensor

from splitserve.engine.device import select_device
from splitserve.engine.model.layers import LayerLoader
from splitserve.engine.model.weights import Checkpoint
from splitserve.engine.vision import tower as tower_module
from splitserve.engine.vision.config import VisionConfig, tower_of
from splitserve.engine.vision.patches import patches_of, places_of, windows_of
from splitserve.engine.vision.tower import VisionTower
from splitserve.kernels.reference import TorchKernels

IMAGES = [(84, 140), (56, 112), (28, 56)]
"""Windows of 2 x 2 rows of embeddings: with smaller ones at both edges, without, and less than one."""


def images_of(family: str) -> list[tuple[int, int]]:
    return [(TILE, TILE), (3 * TILE, TILE)] if family == "internvl" else IMAGES


@contextmanager
def tower(folder: Path, dtype: torch.dtype = torch.float32) -> Iterator[tuple[VisionConfig, VisionTower]]:
    config = tower_of(folder)
    assert config is not None
    with Checkpoint(folder) as checkpoint, torch.inference_mode():
        load = LayerLoader(checkpoint, TorchKernels(), dtype, select_device("cpu"))
        yield config, VisionTower(config, load)


def ours(made: VisionTower, height: int, width: int) -> list[Tensor]:
    features = made(torch.from_numpy(random_image(height, width)))
    return [features.rows, *features.deep]


@pytest.mark.parametrize("family", MORE)
def test_features_are_transformers(tmp_path: Path, family: str) -> None:
    model = make_vision_checkpoint(tmp_path, family)
    with tower(tmp_path) as (config, made):
        for height, width in images_of(family):
            theirs = their_features(model, family, random_image(height, width))
            found = ours(made, height, width)
            assert len(found) == len(theirs) == 1 + len(config.tower.deep_layers)
            assert len(found[0]) == config.num_rows(height, width)
            for our, their in zip(found, theirs, strict=True):
                torch.testing.assert_close(our, their, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("family", ["glm4v", "internvl", "kimi_k25", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, multiplies: bool
) -> None:
    """Nearer on CPUs that have no bfloat16 and compute in float32."""
    monkeypatch.setattr(tower_module, "cpu_multiplies_bfloat16", lambda: multiplies)
    model, size = make_vision_checkpoint(tmp_path, family, torch.bfloat16), images_of(family)[0]
    most, exact = 1.2 if multiplies else 0.6, their_features(model, family, random_image(*size))
    theirs = their_features(model.bfloat16(), family, random_image(*size))
    with tower(tmp_path, torch.bfloat16) as (_, made):
        for our, their, right in zip(ours(made, *size), theirs, exact, strict=True):
            assert our.dtype == torch.bfloat16
            assert (our - right).norm() < most * (their - right).norm() < 0.1 * right.norm()


@pytest.mark.parametrize("family", ["mistral3", "qwen3_vl"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.7, 0.9], "rescale_factor": 0.003},
        {"image_mean": 0.5, "image_std": 0.25},
        {"do_normalize": False},
        {"do_rescale": False},
    ],
)
def test_patches_are_those_of_transformers_image_processors(
    tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    make_vision_checkpoint(tmp_path, family)
    write_processor(tmp_path, **options)
    config = tower_of(tmp_path)
    assert config is not None
    for size in IMAGES:
        found = patches_of(torch.from_numpy(random_image(*size)), config.tower, torch.float32)
        theirs = processed(family, random_image(*size), **options)["pixel_values"]
        if family == "mistral3":
            columns = theirs[0].unfold(1, PATCH_SIZE, PATCH_SIZE).unfold(2, PATCH_SIZE, PATCH_SIZE)
            row, column = places_of(size[0] // PATCH_SIZE, size[1] // PATCH_SIZE, 2).unbind(1)
            theirs = columns[:, row, column].transpose(0, 1).flatten(1)
        assert torch.equal(found, theirs)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral3", {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}),
        ("mistral3", {"multimodal_projector_bias": True, "projector_hidden_act": "silu"}),
        ("mistral3", {"rms_norm_eps": 0.3}),
        ("mistral3", {"hidden_act": "silu", "spatial_merge_size": 1}),
        ("glm4v", {"rms_norm_eps": 0.3, "hidden_act": "gelu"}),
        ("glm4v_moe", {"temporal_patch_size": 1, "image_size": 42}),
        ("internvl", {"norm_type": "rms_norm", "attention_bias": False, "use_qk_norm": True}),
        ("internvl", {"layer_norm_eps": 0.3, "hidden_act": "silu", "projector_hidden_act": "silu"}),
        ("kimi_k25", {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}),
        ("kimi_k25", {"hidden_act": "gelu", "projection_layer_norm_eps": 0.3}),
        ("qwen2_5_vl", {"hidden_act": "gelu", "window_size": 84, "fullatt_block_indexes": []}),
        ("qwen3_vl", {"temporal_patch_size": 1, "deepstack_visual_indexes": []}),
    ],
)
def test_what_config_json_asks_for_is_done(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    size = images_of(family)[-1] if family == "internvl" else (112, 140)
    model, image = make_vision_checkpoint(tmp_path, family, **changes), random_image(*size)
    options = {key: value for key, value in changes.items() if key == "temporal_patch_size"}
    with tower(tmp_path) as (_, made):
        (found,), (theirs,) = ours(made, *size), their_features(model, family, image, **options)
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=2e-5)


def test_an_image_of_other_sides_is_refused(tmp_path: Path) -> None:
    make_vision_checkpoint(tmp_path, "qwen3_vl")
    with tower(tmp_path) as (_, made):
        for size in ((56, 42), (42, 56), (0, 28)):
            with pytest.raises(ValueError, match="both must be multiples of 28"):
                made(torch.zeros(*size, 3, dtype=torch.uint8))


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (6, 10), (8, 8), (4, 18), (14, 2)])
def test_windows_hold_each_patch_once_and_groups_stay_together(
    tmp_path: Path, rows: int, columns: int
) -> None:
    make_vision_checkpoint(tmp_path, "qwen2_5_vl")
    config = tower_of(tmp_path)
    assert config is not None
    windows, places = windows_of(rows, columns, config.tower), places_of(rows, columns, 2)
    assert sorted(windows.order.tolist()) == list(range(rows * columns))
    assert torch.equal(windows.order[::4][windows.back], torch.arange(0, rows * columns, 4))
    ends = [size for number, size in windows.runs for _ in range(number)]
    for window in places[windows.order].split(ends):
        assert len({(row // 4, column // 4) for row, column in window.tolist()}) == 1
