"""Which towers are loaded, by config.json, the processor's files and the tensors."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import make_checkpoint, write_byte_tokenizer
from support.vision_models import MORE, make_vision_checkpoint, rename, write_processor

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.model_folder import check_model_folder, content_names
from splitserve.engine.vision.config import VisionConfig, tower_of, vision_config

NAMES = {
    "internvl": ("vision_tower.", "multi_modal_projector."),
    "kimi_k25": ("vision_tower.", "mm_projector."),
    "mistral3": ("vision_tower.", "multi_modal_projector."),
    "qwen2_5_vl": ("visual.",),
}


def read(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "config.json").read_text())
    assert isinstance(found, dict)
    return found


def change(folder: Path, **vision: Any) -> None:
    """Set keys of config.json's vision_config, or those beside it that it lacks."""
    config = read(folder)
    for key, value in vision.items():
        part = config if key in config and key not in config["vision_config"] else config["vision_config"]
        part[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Text is served all the same."""
    caplog.clear()
    write_byte_tokenizer(folder)
    check_model_folder(folder)
    assert tower_of(folder) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "text alone is served, without images" in record.getMessage()
    return record.getMessage()


def tower(folder: Path) -> VisionConfig:
    found = tower_of(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("family", MORE)
def test_exactly_the_towers_tensors_are_expected_and_counted(tmp_path: Path, family: str) -> None:
    make_vision_checkpoint(tmp_path, family)
    stored = load_file(tmp_path / "model.safetensors")
    own = {
        name: tuple(tensor.shape)
        for name, tensor in stored.items()
        if name.startswith(NAMES.get(family, ("model.visual.",)))
    }
    config = tower(tmp_path)
    assert config.expected_tensors() == own
    assert config.num_bytes(2) == 2 * sum(map(math.prod, own.values()))


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (
            "mistral3",
            [
                ("language_model.model.", "model.language_model."),
                ("vision_tower.", "model.vision_tower."),
                ("multi_modal_projector.", "model.multi_modal_projector."),
            ],
        ),
        (
            "internvl",
            [
                ("language_model.lm_head.", "lm_head."),
                ("language_model.model.", "model.language_model."),
                ("vision_tower.", "model.vision_tower."),
                ("multi_modal_projector.", "model.multi_modal_projector."),
            ],
        ),
        ("qwen2_5_vl", [("model.", "model.language_model."), ("visual.", "model.visual.")]),
    ],
)
def test_later_checkpoints_have_other_names(
    tmp_path: Path, family: str, names: list[tuple[str, str]]
) -> None:
    make_vision_checkpoint(tmp_path, family)
    write_byte_tokenizer(tmp_path)
    before = tower(tmp_path).expected_tensors()
    rename(tmp_path, *names)
    check_model_folder(tmp_path)
    after = tower(tmp_path).expected_tensors()
    assert not before.keys() & after.keys()
    assert list(before.values()) == list(after.values())
    assert after.keys() <= load_file(tmp_path / "model.safetensors").keys()


def test_a_folder_without_weights_is_believed(tmp_path: Path) -> None:
    make_vision_checkpoint(tmp_path, "qwen3_vl")
    found = tower(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert tower(tmp_path) == found


@pytest.mark.parametrize("family", ["llama3", "exaone4_5"])
def test_families_without_a_tower_here_pass_without_a_word(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, family)
    assert tower_of(tmp_path) is None
    assert not caplog.records


def test_a_text_model_saved_alone_needs_no_tower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_vision_checkpoint(tmp_path, "qwen3_vl")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if ".visual." not in k}, tmp_path / "model.safetensors")
    assert "no tensor 'model.visual.patch_embed.proj.weight'" in refusal(tmp_path, caplog)


def test_quantised_and_misshapen_towers_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_vision_checkpoint(tmp_path, "mistral3")
    name, file = "vision_tower.transformer.layers.1.attention.q_proj.weight", tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file)
    assert f"{name!r} is F8_E4M3; a vision tower with quantised weights is not built" in refusal(
        tmp_path, caplog
    )
    save_file({**tensors, name: tensors[name][1:].contiguous()}, file)
    assert f"{name!r} has shape [31, 32], config.json implies [32, 32]" in refusal(tmp_path, caplog)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_vl", {"depth": 1 << 40}, "'depth' is 1099511627776; the largest that is served is 1024"),
        ("qwen3_vl", {"depth": -1}, "'depth' must be a positive whole number, found -1"),
        ("qwen3_vl", {"hidden_size": "32"}, "'hidden_size' must be a positive whole number"),
        ("qwen3_vl", {"num_heads": 5}, "5 heads for hidden_size 32"),
        ("qwen3_vl", {"num_position_embeddings": 24}, "num_position_embeddings 24, which is no square"),
        ("qwen3_vl", {"deepstack_visual_indexes": [4]}, r"layers \[4\]; there are 4"),
        ("qwen3_vl", {"deepstack_visual_indexes": [2, 0]}, r"layers \[2, 0\], which are not in order"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 1, 2, 3]}, "for a decoder of 3 layers"),
        ("qwen3_vl", {"deepstack_visual_indexes": "0"}, "layers '0'"),
        ("qwen3_vl", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("qwen3_vl", {"hidden_act": ["relu"]}, "of the wrong type"),
        ("qwen3_vl", {"out_hidden_size": 32}, "out_hidden_size 32 for a decoder of hidden_size 64"),
        ("qwen3_vl", {"in_channels": 1}, "images of 1 channels is not built"),
        ("qwen3_vl", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not built"),
        ("qwen3_vl", {"rope_parameters": {"rope_theta": 0}}, "rope_theta 0.0 is not built"),
        ("qwen3_vl", {"rope_parameters": {"rope_theta": "much"}}, "of the wrong type"),
        ("glm4v", {"attention_bias": True}, "attention_bias True"),
        ("glm4v", {"text_config": {"hidden_size": 64}}, "a text model without mrope_section"),
        ("internvl", {"norm_type": "batch_norm"}, "norm_type 'batch_norm'"),
        ("internvl", {"use_mean_pooling": False}, r"use_mean_pooling False \(known: True\)"),
        ("internvl", {"vision_feature_layer": -2}, r"vision_feature_layer -2 \(known: -1\)"),
        ("internvl", {"image_size": [70, 70]}, "image_size 70 with patch_size 14"),
        ("internvl", {"image_size": [56, 28]}, "'image_size' must be a positive whole number"),
        ("kimi_k25", {"pos_emb_width": 6}, "pos_emb_height 5 with pos_emb_width 6"),
        ("kimi_k25", {"merge_kernel_size": [2, 1]}, r"merge_kernel_size \[2, 1\] \(known: \[2, 2\]\)"),
        ("kimi_k25", {"mm_projector_type": "patchmergerv2"}, "mm_projector_type 'patchmergerv2'"),
        ("qwen2_5_vl", {"window_size": 27}, "window_size 27, which is less than a row"),
        ("qwen2_5_vl", {"fullatt_block_indexes": [0.5]}, r"layers \[0.5\]; there are 3"),
        ("mistral3", {"head_dim": 32}, "head_dim 32; of 2 heads: 16"),
        ("mistral3", {"model_type": "siglip"}, "a vision tower of type 'siglip' is not built"),
        ("mistral3", {"vision_feature_layer": -2}, r"vision_feature_layer -2 \(known: -1\)"),
        ("mistral3", {"projector_hidden_act": "relu"}, "hidden_act 'relu'"),
    ],
)
def test_a_tower_that_is_not_built_is_left_out_with_a_sentence(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_vision_checkpoint(tmp_path, family)
    change(tmp_path, **changes)
    caplog.clear()
    assert vision_config(tmp_path, read(tmp_path)) is None
    (record,) = caplog.records
    assert re.search(words, record.getMessage()), record.getMessage()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_mean": [0.5, 0.5]}, "'image_mean' must have 3 numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std is 0"),
        ({"image_std": "wide"}, "'image_std' must be a number"),
        ({"rescale_factor": 1e300}, "'rescale_factor' must be a number"),
        ({"patch_size": 16}, "patch_size is 16, config.json's vision_config has 14"),
        ({"merge_size": 4}, "merge_size is 4, config.json's vision_config has 2"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1, config.json's vision_config has 2"),
    ],
)
def test_a_processor_that_is_not_built_leaves_the_tower_out(
    tmp_path: Path, options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_vision_checkpoint(tmp_path, "qwen2_5_vl")
    write_processor(tmp_path, **options)
    assert words in refusal(tmp_path, caplog)


def test_the_processors_own_file_comes_first_as_for_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_vision_checkpoint(tmp_path, "mistral3")
    write_processor(tmp_path, image_mean=[0.1, 0.2, 0.3])
    (tmp_path / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    assert tower(tmp_path).tower.pixels.mean == (0.1, 0.2, 0.3)
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"image_mean": [0.4, 0.5, 0.6]}}')
    assert tower(tmp_path).tower.pixels.mean == (0.4, 0.5, 0.6)
    (tmp_path / "processor_config.json").write_text("[]")
    assert "processor_config.json must hold a JSON object" in refusal(tmp_path, caplog)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_how_pixels_are_normalised_decides_the_bytes_of_kv(tmp_path: Path, name: str) -> None:
    make_vision_checkpoint(tmp_path, "mistral3")
    names = [content_names(tmp_path)]
    for text in ('{"image_mean": 0.5}', '{"image_mean": 0.4}'):
        (tmp_path / name).write_text(text)
        names.append(content_names(tmp_path))
    assert len({found.kv for found in names}) == len({found.revision for found in names}) == 3


def test_config_json_must_be_an_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="must hold a JSON object"):
        tower_of(tmp_path)
