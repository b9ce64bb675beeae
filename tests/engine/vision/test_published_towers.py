"""Configurations as published are read as published: sizes, and files for image processors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from splitserve.engine.vision.config import VisionConfig, vision_config
from splitserve.engine.vision.pixel_rules import CLIP_MEAN

TEXT = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN_2_5 = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
    "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_3 = {
    "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
    "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
PIXTRAL = {
    "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
    "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral",
    "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14,
}  # fmt: skip
KIMI = {
    "init_pos_emb_height": 64, "init_pos_emb_time": 4, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool", "mm_hidden_size": 1152, "mm_projector_type": "patchmerger", "patch_size": 14,
    "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
    "text_hidden_size": 7168, "video_attn_type": "spatial_temporal", "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304, "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
}  # fmt: skip
KIMI_FILE = {
    "media_proc_cfg": {
        "in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5], "merge_kernel_size": 2,
        "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
    }
}  # fmt: skip
QWEN_FILE = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "do_rescale": None, "size": {}}


def published(
    folder: Path, architecture: str, vision: dict[str, Any], processor: dict[str, Any] | None, **config: Any
) -> VisionConfig:
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    found = vision_config(folder, {"architectures": [architecture], "vision_config": vision, **config})
    assert found is not None
    return found


def millions(config: VisionConfig, beginning: str = "") -> float:
    """Weights in tensors whose names begin so."""
    shapes = config.expected_tensors().items()
    return sum(math.prod(shape) for name, shape in shapes if name.startswith(beginning)) / 1e6


def test_qwen_2_5_vl_7b(tmp_path: Path) -> None:
    text = {**TEXT, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    found = published(tmp_path, "Qwen2_5_VLForConditionalGeneration", QWEN_2_5, None, **text)
    assert 3e9 < found.step_bytes(2) < 4e9
    assert found.expected_tensors()["visual.merger.mlp.2.weight"] == (3584, 5120)
    assert found.expected_tensors()["visual.patch_embed.proj.weight"] == (1280, 3, 2, 14, 14)
    assert millions(found) == pytest.approx(676.55, abs=0.01)
    assert (found.tower.window, found.tower.head_dim, found.tower.pixels.mean) == (4, 80, CLIP_MEAN)
    assert found.num_rows(644, 980) == 23 * 35


def test_qwen_3_vl_8b(tmp_path: Path) -> None:
    file = {**QWEN_FILE, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    found = published(tmp_path, "Qwen3VLForConditionalGeneration", QWEN_3, file, text_config=TEXT)
    name = "model.visual.deepstack_merger_list.2"
    assert found.expected_tensors()[f"{name}.linear_fc2.weight"] == (4096, 4608)
    assert found.expected_tensors()[f"{name}.norm.weight"] == (4608,)
    assert millions(found) == pytest.approx(576.4, abs=0.1)
    assert (found.tower.grid, found.tower.deep_layers) == (48, (8, 16, 24))
    assert (found.tower.pixels.mean, found.tower.pixels.factor) == ((0.5, 0.5, 0.5), 1 / 255)


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 10000.0}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}]
)
def test_mistral_small_3_1(tmp_path: Path, rope: dict[str, Any]) -> None:
    file = {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 1540}}
    found = published(
        tmp_path,
        "Mistral3ForConditionalGeneration",
        {**PIXTRAL, **rope},
        file,
        text_config={**TEXT, "hidden_size": 5120, "model_type": "mistral", "head_dim": 128},
        multimodal_projector_bias=False,
        projector_hidden_act="gelu",
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    assert found.expected_tensors()["multi_modal_projector.linear_1.weight"] == (5120, 1024)
    assert millions(found, "vision_tower.") == pytest.approx(403, abs=1)
    assert (found.tower.theta, found.tower.activation, found.tower.projector_eps) == (1e4, "silu", 1e-5)
    assert found.num_rows(1540, 1036) == 55 * 37


def test_kimi_k2_5(tmp_path: Path) -> None:
    text = {**TEXT, "hidden_size": 7168, "model_type": "kimi_k2"}
    found = published(tmp_path, "KimiK25ForConditionalGeneration", KIMI, KIMI_FILE, text_config=text)
    assert found.expected_tensors()["mm_projector.proj.2.weight"] == (7168, 4608)
    assert found.expected_tensors()["vision_tower.encoder.blocks.26.wqkv.weight"] == (3456, 1152)
    assert found.expected_tensors()["vision_tower.patch_embed.pos_emb.weight"] == (64, 64, 1152)
    assert millions(found, "vision_tower.") == pytest.approx(417, abs=1)
    assert (found.tower.head_dim, found.tower.theta, found.tower.pixels.mean) == (72, 1e4, (0.5, 0.5, 0.5))
    assert 3e9 < found.step_bytes(2) < 4e9


INTERNVL = {
    "attention_bias": True, "hidden_act": "gelu", "hidden_size": 1024, "image_size": [448, 448],
    "intermediate_size": 4096, "layer_norm_eps": 1e-6, "norm_type": "layer_norm",
    "model_type": "internvl_vision", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24,
    "patch_size": [14, 14], "use_absolute_position_embeddings": True, "use_mask_token": False,
    "use_mean_pooling": True, "use_qk_norm": False,
}  # fmt: skip
INTERNVL_6B = {
    **INTERNVL, "attention_bias": False, "hidden_size": 3200, "intermediate_size": 12800,
    "norm_type": "rms_norm", "num_attention_heads": 25, "num_hidden_layers": 45, "use_qk_norm": True,
}  # fmt: skip
INTERNVL_FILE = {
    "crop_to_patches": False, "size": {"height": 448, "width": 448}, "image_mean": [0.485, 0.456, 0.406]
}  # fmt: skip


@pytest.mark.parametrize(("vision", "size"), [(INTERNVL, 304), (INTERNVL_6B, 5536)])
def test_internvl(tmp_path: Path, vision: dict[str, Any], size: int) -> None:
    text = {**TEXT, "model_type": "qwen3"}
    architecture = "InternVLForConditionalGeneration"
    found = published(tmp_path, architecture, vision, INTERNVL_FILE, text_config=text)
    assert millions(found, "vision_tower.") == pytest.approx(size, abs=1)
    width = vision["hidden_size"]
    assert found.expected_tensors()["vision_tower.embeddings.position_embeddings"] == (1, 1025, width)
    assert found.expected_tensors()["multi_modal_projector.linear_1.weight"] == (4096, 4 * width)
    assert found.num_rows(7 * 448, 448) == 7 * 256
    assert found.tower.pixels.mean == (0.485, 0.456, 0.406)
    with pytest.raises(ValueError, match="both must be multiples of 448"):
        found.num_rows(448, 28)


GLM = {
    "attention_bias": False, "depth": 24, "hidden_act": "silu", "hidden_size": 1536, "image_size": 336,
    "in_channels": 3, "intermediate_size": 10944, "num_heads": 12, "out_hidden_size": 4096, "patch_size": 14,
    "rms_norm_eps": 1e-5, "spatial_merge_size": 2, "temporal_patch_size": 2, "model_type": "glm4v_moe",
}  # fmt: skip
GLM_FILE = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 12544}}


def test_glm_4_5v(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12]}
    text = {**TEXT, "rope_scaling": rope, "head_dim": 128, "rope_theta": 10000.0}
    found = published(tmp_path, "Glm4vMoeForConditionalGeneration", GLM, GLM_FILE, text_config=text)
    tensors = found.expected_tensors()
    assert tensors["model.visual.embeddings.position_embedding.weight"] == (576, 1536)
    assert tensors["model.visual.blocks.23.mlp.down_proj.weight"] == (1536, 4096)
    assert tensors["model.visual.downsample.weight"] == (4096, 1536, 2, 2)
    assert tensors["model.visual.merger.down_proj.weight"] == (4096, 10944)
    assert (found.tower.grid, found.tower.head_dim, found.tower.names.eps) == (24, 128, 1e-5)
    assert 3e9 < found.step_bytes(2) < 5e9
