"""A worker's model has its tower: in the model's dtype, on each rank, and counted as memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import engine_config
from support.vision_models import make_vision_checkpoint, random_image, their_features

from splitserve.engine.engine_config import gpu_room_of
from splitserve.engine.load_model import expected_worker
from splitserve.engine.loaded_model import LoadedModel
from splitserve.engine.ranks.threads import load_ranks
from splitserve.engine.vision.config import tower_of

IMAGE = torch.from_numpy(random_image(84, 140))


def loaded(folder: Path, **settings: Any) -> list[LoadedModel]:
    return load_ranks(engine_config(folder, "cpu", block_size=8, num_blocks=64, **settings))


@pytest.mark.parametrize("exact", [False, True])
def test_each_rank_computes_all_features(tmp_path: Path, exact: bool) -> None:
    model = make_vision_checkpoint(tmp_path, "qwen3_vl")
    ranks = loaded(tmp_path, dtype="float32", exact=exact, tensor_parallel_size=2)
    towers = [each.vision for each in ranks]
    assert len(towers) == 2
    rows, deep = their_features(model, "qwen3_vl", IMAGE.numpy())[:2]
    for tower in towers:
        assert tower is not None
        features = tower(IMAGE)
        torch.testing.assert_close(features.rows, rows, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(features.deep[0], deep, rtol=1e-4, atol=2e-5)


def test_features_have_the_models_dtype(tmp_path: Path) -> None:
    make_vision_checkpoint(tmp_path, "mistral3", torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        (found,) = loaded(tmp_path, dtype=str(dtype).removeprefix("torch."))
        assert found.vision is not None
        assert found.vision(IMAGE).rows.dtype == dtype


def test_without_the_towers_tensors_the_text_is_loaded_and_less_memory_counted(tmp_path: Path) -> None:
    make_vision_checkpoint(tmp_path, "qwen2_5_vl")
    config, file = tower_of(tmp_path), tmp_path / "model.safetensors"
    assert config is not None
    (whole,), expected = loaded(tmp_path, dtype="float32"), expected_worker(tmp_path).weights
    save_file({k: v for k, v in load_file(file).items() if not k.startswith("visual.")}, file)
    (text,) = loaded(tmp_path, dtype="float32")
    assert whole.vision is not None
    assert text.vision is None
    assert whole._weight_bytes - text._weight_bytes == config.num_bytes(4)
    assert expected - expected_worker(tmp_path).weights in (config.num_bytes(2), config.num_bytes(4))


def test_a_decode_worker_takes_such_prompts_and_has_no_tower(tmp_path: Path) -> None:
    make_vision_checkpoint(tmp_path, "qwen2_5_vl")
    tower, config = tower_of(tmp_path), engine_config(tmp_path, "cpu", num_blocks=8, dtype="float32")
    assert tower is not None
    (prefill,), (decode,) = load_ranks(config), load_ranks(replace(config, computes_images=False))
    assert prefill.vision is not None
    assert decode.vision is None
    assert prefill.takes_images
    assert decode.takes_images
    assert prefill._weight_bytes - decode._weight_bytes == tower.num_bytes(4)


def test_a_gpu_has_room_left_for_the_largest_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_vision_checkpoint(tmp_path, "qwen2_5_vl")
    config, tower = engine_config(tmp_path, "cpu", num_blocks=8), tower_of(tmp_path)
    assert tower is not None
    model = load_ranks(config)[0].config
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    of = config, model, torch.device("cuda"), torch.bfloat16, 10 << 30
    room = gpu_room_of(*of, None)
    assert room - (3 << 30) < gpu_room_of(*of, tower) < room - (2 << 30)
