"""Small seeded random models for text and images, written as a Hugging Face folder; and
transformers' features of an image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from .families import ALL_FAMILIES, SMALL
from .models import name_as_published

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_attention_heads": 2, "head_dim": 16}
MORE: dict[str, dict[str, Any]] = {
    "glm4v": {"depth": 3, "image_size": 70},
    "glm4v_moe": {"depth": 2, "image_size": 70},
    "internvl": {"num_hidden_layers": 3},
    "kimi_k25": {
        "num_hidden_layers": 3,
        "projection_hidden_size": 32,
        "pos_emb_height": 5,
        "pos_emb_width": 5,
    },
    "mistral3": {"num_hidden_layers": 3},
    "qwen2_5_vl": {"depth": 3, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_5_images": {"depth": 2},
    "qwen3_vl": {"depth": 4, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 25},
    "qwen3_vl_moe": {"depth": 2, "deepstack_visual_indexes": [1]},
}
"""By family: the tower's values that are not the smallest ones."""
PATCH_SIZE = 14
TILE = 56  # InternVL's; its images are one tile wide


def make_vision_checkpoint(
    path: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Write the folder, in ``dtype``, and return the model, in float32. ``changes``: to config.json."""
    model_class, config_class, own = ALL_FAMILIES[family]
    config = config_class(**{**SMALL, **own})
    for key, value in {**SIZES, **MORE[family], **changes}.items():
        for part in (config.vision_config, config, config.text_config):
            if hasattr(part, key):
                setattr(part, key, value)
                break
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if any(part in name for part in ("vision", "visual", "projector")):
                shape = tensor.shape
                spread = 0.3 if len(shape) == 1 else shape[1:].numel() ** -0.5
                if any(part in name for part in ("patch_conv", "patch_embed", "pos_embed")):
                    spread *= 1e-3  # so small that the eps of the first norms shows
                tensor.copy_((len(shape) == 1 and name.endswith("weight")) + spread * torch.randn(shape))
            tensor.copy_(tensor.to(dtype))
    model.to(dtype).save_pretrained(path)
    if family == "kimi_k25":
        name_as_published(path, family)
    return model.float().eval()


def write_processor(path: Path, **options: Any) -> None:
    (path / "preprocessor_config.json").write_text(json.dumps(options))


def rename(path: Path, *names: tuple[str, str]) -> None:
    """Give each tensor whose name begins with the first of a pair the second as its beginning."""
    tensors = load_file(path / "model.safetensors")
    for old, new in names:
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, path / "model.safetensors")


def random_image(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


def processed(family: str, image: NDArray[np.uint8], **options: Any) -> dict[str, Tensor]:
    """What transformers' image processor makes of an image that needs no other size."""
    if family == "kimi_k25":
        rows, columns = (side // PATCH_SIZE for side in image.shape[:2])
        (values,) = processed("mistral3", image, **{"image_mean": 0.5, "image_std": 0.5, **options})[
            "pixel_values"
        ]
        tiles = values.unfold(1, PATCH_SIZE, PATCH_SIZE).unfold(2, PATCH_SIZE, PATCH_SIZE)
        grid = torch.tensor([[1, rows, columns]])
        return {"pixel_values": tiles.permute(1, 2, 0, 3, 4).flatten(0, 1), "image_grid_thw": grid}
    if family == "internvl":
        tiles = np.split(image, len(image) // TILE)
        values = [processed("mistral3", tile, **options)["pixel_values"] for tile in tiles]
        return {"pixel_values": torch.cat(values)}
    kind = PixtralImageProcessorPil if family == "mistral3" else Qwen2VLImageProcessorPil
    size = {"height": PATCH_SIZE, "width": PATCH_SIZE} if family == "mistral3" else PATCH_SIZE
    return dict(kind(patch_size=size, **options)(image, do_resize=False, return_tensors="pt"))


def their_features(
    model: PreTrainedModel, family: str, image: NDArray[np.uint8], **options: Any
) -> list[Tensor]:
    """The rows of embeddings, then those for deeper layers."""
    inputs = processed(family, image, **options)
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    with torch.inference_mode():
        found = model.model.get_image_features(**inputs)
    deep = getattr(found, "deepstack_features", None) or ()
    rows = [each if isinstance(each, Tensor) else each[0] for each in (found.pooler_output, *deep)]
    return [each.flatten(0, -2) for each in rows]
