"""Prompts with images, for this project's engine and for transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitserve.transport.messages.images import Image, image_name, image_token_ids

PATCH, MERGED = 14, 2
PLACEHOLDER = 5


def an_image(rows: int, columns: int, seed: int) -> tuple[int, int, bytes]:
    """Height, width and random pixels of an image of this many rows and columns of tokens (Qwen's)."""
    height, width = rows * PATCH * MERGED, columns * PATCH * MERGED
    noise = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3))
    pixels = noise.repeat(PATCH * MERGED, 0).repeat(PATCH * MERGED, 1).astype(np.uint8)
    return height, width, pixels.tobytes()


@dataclass
class ImagePrompt:
    """``token_ids`` as workers get them, ``words`` with placeholders as transformers has them."""

    token_ids: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    def add_words(self, *words: int) -> ImagePrompt:
        self.token_ids += words
        self.words += words
        return self

    def add_qwen_image(self, rows: int, columns: int, seed: int) -> ImagePrompt:
        height, width, pixels = an_image(rows, columns, seed)
        image = Image(
            first=len(self.token_ids),
            num_tokens=rows * columns,
            height=height,
            width=width,
            pixels=pixels,
            num_positions=max(rows, columns),
        )
        self.images.append(image)
        self.token_ids += image_token_ids(image_name(height, width, pixels), rows * columns).tolist()
        self.words += [PLACEHOLDER] * (rows * columns)
        return self

    @property
    def rope_shift(self) -> int:
        return sum(image.num_positions - image.num_tokens for image in self.images)


def qwen_patches(image: Image) -> tuple[Tensor, list[int]]:
    """float32 [patches, numbers] as transformers' image processor gives them for mean and deviation 0.5, and
    the grid (time, rows, columns) of patches."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
    scaled = torch.from_numpy(pixels / 127.5 - 1).float().permute(2, 0, 1)
    rows, columns = image.height // PATCH // MERGED, image.width // PATCH // MERGED
    blocks = scaled.view(3, rows, MERGED, PATCH, columns, MERGED, PATCH).permute(1, 4, 2, 5, 0, 3, 6)
    patches = blocks.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1)  # a still image is two frames
    return patches.reshape(rows * columns * MERGED**2, -1), [1, rows * MERGED, columns * MERGED]


def transformers_inputs(prompt: ImagePrompt, answer: list[int]) -> dict[str, Any]:
    """What a Qwen model of transformers takes for the prompt and an answer behind it."""
    ids = torch.tensor([[*prompt.words, *answer]])
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == PLACEHOLDER).int()}
    if prompt.images:
        patches, grids = zip(*map(qwen_patches, prompt.images), strict=True)
        inputs |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    return inputs
