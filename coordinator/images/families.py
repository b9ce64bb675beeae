"""The images of each family: sizes, and the tokens that stand for one.

Sizes, resizing and tokens are those of transformers' processors, of those that use Pillow to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ...transport.messages.images import MAX_PIXEL_BYTES
from .reading import BICUBIC
from .rules import MOST_PIXELS, ImageRules

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_RATIO = 200
"""The longer side of an image over its shorter one, for Qwen's models."""


@dataclass(frozen=True, slots=True)
class QwenImages(ImageRules):
    """Qwen2.5-VL, Qwen3-VL, Qwen3.5: pixels within bounds, and rope positions in rows and columns."""

    least_pixels: int
    most_pixels: int

    @property
    def least(self) -> int:
        return max(self.least_pixels, self.side * self.side)

    def size(self, height: int, width: int) -> tuple[int, int]:
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(f"one of its sides is more than {MAX_RATIO} times as long as the other")
        side, num_pixels = self.side, height * width
        rows, columns = round(height / side), round(width / side)
        most = min(self.most_pixels, self.bound or self.most_pixels)
        if rows * columns * side * side > most:
            shrink = math.sqrt(num_pixels / most)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side * side < self.least_pixels:
            grow = math.sqrt(self.least_pixels / num_pixels)
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * side, columns * side

    def num_positions(self, rows: int, columns: int) -> int:
        return max(rows, columns)


@dataclass(frozen=True, slots=True)
class GlmImages(QwenImages):
    """GLM-4.1V to 4.6V: an image less than ``side`` high or wide is enlarged first."""

    def size(self, height: int, width: int) -> tuple[int, int]:
        if min(height, width) < self.side:
            scale = max(self.side / height, self.side / width)
            height, width = int(height * scale), int(width * scale)
        return QwenImages.size(self, height, width)


@dataclass(frozen=True, slots=True)
class PixtralImages(ImageRules):
    """Mistral 3: images are only made smaller, and tokens mark the ends of rows and of the image."""

    most_height: int
    most_width: int
    row_end: int
    image_end: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        shrink = max(height / self.most_height, width / self.most_width)
        if shrink > 1:
            height, width = math.floor(height / shrink), math.floor(width / shrink)
        if not height or not width:
            raise ValueError("it is too narrow: nothing is left of its shorter side")
        return -(-height // self.side) * self.side, -(-width // self.side) * self.side

    def layout(self, rows: int, columns: int) -> list[int | None]:
        row = [*[None] * columns, self.row_end]
        return [*(row * rows)[:-1], self.image_end]


@dataclass(frozen=True, slots=True)
class KimiImages(ImageRules):
    """Kimi K2.5: images are only made smaller, within a number of patches and one of each side."""

    patch: int
    most_patches: int
    most_patches_a_side: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        num_patches = max(1, height // self.patch) * max(1, width // self.patch)
        most = min(self.most_patches, (self.bound or MAX_PIXEL_BYTES) // self.patch**2)
        longest = self.most_patches_a_side * self.patch
        scale = min(1.0, math.sqrt(most / num_patches), longest / height, longest / width)
        return min(longest, max(1, int(height * scale))), min(longest, max(1, int(width * scale)))


@dataclass(frozen=True, slots=True)
class InternVLImages(ImageRules):
    """InternVL: an image is stretched over a grid of square tiles, about of its shape, and cut into them; a
    thumbnail follows. The tiles stand below each other."""

    tile: int
    least_tiles: int
    most_tiles: int
    start: int
    end: int

    @property
    def least(self) -> int:
        return self.tile * self.tile

    def size(self, height: int, width: int) -> tuple[int, int]:
        room = min(self.bound or MOST_PIXELS, MOST_PIXELS) // self.tile**2 - 1  # for the thumbnail
        shape, least, found = width / height, math.inf, (1, 1)
        for columns, rows in _grids(self.least_tiles, max(1, min(self.most_tiles, room))):
            difference = abs(shape - columns / rows)
            fills_half = height * width > 0.5 * self.tile * self.tile * columns * rows
            if difference < least or (difference == least and fills_half):
                least, found = difference, (columns, rows)
        return found[1] * self.tile, found[0] * self.tile

    def fitted(self, picture: Picture) -> Picture:
        from PIL import Image

        height, width = self.bounded_size(picture.height, picture.width)
        side, whole = self.tile, picture.resize((width, height), BICUBIC)
        corners = [(x, y) for y in range(0, height, side) for x in range(0, width, side)]
        tiles = [whole.crop((x, y, x + side, y + side)) for x, y in corners]
        if len(tiles) > 1:
            tiles.append(picture.resize((side, side), BICUBIC))
        column = Image.new("RGB", (side, side * len(tiles)))
        for number, tile in enumerate(tiles):
            column.paste(tile, (0, side * number))
        return column

    def layout(self, rows: int, columns: int) -> list[int | None]:
        return [self.start, *[None] * (rows * columns), self.end]


@lru_cache(maxsize=8)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return columns and rows of all grids of ``least`` to ``most`` tiles, by their number, then by width."""
    sides = range(1, most + 1)
    grids = ((columns, rows) for columns in sides for rows in range(1, most // columns + 1))
    return sorted((grid for grid in grids if math.prod(grid) >= least), key=math.prod)
