"""Images as transformers' processors have them, without torchvision, and what its models answer."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from .image_models import PREPROCESSORS


@contextmanager
def _torchvision() -> Iterator[None]:
    """Put empty modules in its place, for imports."""
    names = "torchvision", "torchvision.transforms", "torchvision.transforms.v2"
    made = {name: ModuleType(name) for name in names}
    made[names[2]].functional = ModuleType("functional")  # type: ignore[attr-defined]
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def their_kimi_pixels(picture: Image.Image, options: Mapping[str, Any]) -> NDArray[np.uint8]:
    """[height, width, 3]: resized and filled up by transformers' sizes; by Pillow, as the checkpoint's own
    processor does it."""
    with _torchvision():
        module = importlib.import_module("transformers.models.kimi_k25.image_processing_kimi_k25")
    (height, width), (whole_height, whole_width) = module.navit_resize(
        picture.height,
        picture.width,
        options["patch_size"],
        options["merge_kernel_size"],
        options["in_patch_limit"],
        options["patch_limit_on_one_side"],
    )
    small = np.asarray(_in_rgb(picture).resize((width, height), Image.Resampling.BICUBIC))
    return np.pad(small, ((0, whole_height - height), (0, whole_width - width), (0, 0)))


def their_kimi_inputs(pictures: Sequence[Image.Image], options: Mapping[str, Any]) -> dict[str, Tensor]:
    side, values, grids = options["patch_size"], [], []
    for picture in pictures:
        pixels = their_kimi_pixels(picture, options)
        rows, columns = (size // side for size in pixels.shape[:2])
        normed = (torch.from_numpy(pixels).float() / 255 - 0.5) / 0.5
        tiles = normed.view(rows, side, columns, side, 3).permute(0, 2, 4, 1, 3)
        values.append(tiles.reshape(-1, 3, side, side))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}


def their_logits(model: Any, family: str, ids: Sequence[int], first: int, *files: bytes) -> Tensor:
    """[len(ids) - first, vocabulary], for a prompt with files of images; no mark of an image is likely."""
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    options, mark = {**PREPROCESSORS[family], "return_tensors": "pt"}, model.config.image_token_id
    tokens = torch.tensor([[*ids]])
    if family == "kimi_k25":
        inputs = their_kimi_inputs(pictures, options["media_proc_cfg"])
    elif "internvl" in family:
        inputs = dict(GotOcr2ImageProcessorPil(**options, crop_to_patches=True)(pictures))
        del inputs["num_patches"]
    elif "mistral3" in family:
        options["patch_size"] = 2 * model.config.vision_config.patch_size
        inputs = dict(PixtralImageProcessorPil(**options)(pictures, return_tensors="pt"))
    else:
        kind = Glm46VImageProcessorPil if "glm" in family else Qwen2VLImageProcessorPil
        inputs = dict(kind(**options)(pictures))
        inputs["mm_token_type_ids"] = (tokens == mark).int()
        model.model.rope_deltas = None
    with torch.inference_mode():
        logits = model(input_ids=tokens, **inputs).logits[0, first:].clone()
        logits[:, mark] = -torch.inf
    return logits


def _in_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode != "RGBA":
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")
