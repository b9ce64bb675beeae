"""Images as transformers' processors that need torchvision have them, without it."""

from __future__ import annotations

import importlib
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


def _in_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode != "RGBA":
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")
