"""How the served model takes images: to which size they are resized, and which tokens stand for one.

By config.json and the files of the image processor beside it, preprocessor_config.json and
processor_config.json. Sizes, resizing and tokens are those of transformers' processors that use Pillow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from ...transport.messages.images import MAX_PIXEL_BYTES
from .reading import BICUBIC

MOST_PIXELS = MAX_PIXEL_BYTES // 3
MAX_RATIO = 200
"""The longer side of an image over its shorter one, for Qwen's models."""
QWEN_PATCHES = {"qwen2_5_vl": 14, **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), 16)}
"""The pixels of a patch's side where config.json leaves them out, by family."""
FIXED = {"do_resize": True, "resample": BICUBIC, "do_convert_rgb": True, "do_center_crop": False}
"""Options of image processors, each with the only value that is built."""


class NoImages(NamedTuple):
    """``why`` the model takes no images; empty: it has no part for them."""

    why: str = ""

    def bounded_by(self, bound: int | None) -> Self:
        """See ``ImageRules``."""
        if bound is not None:
            raise ValueError(f"--image-max-pixels {bound}: the model takes no images")
        return self


@dataclass(frozen=True, slots=True)
class ImageRules(ABC):
    """Rows and columns are those of an image's features."""

    token: str
    """Written by the chat template where an image stands."""
    token_id: int
    side: int
    """Pixels of the square that becomes one feature."""
    bound: int | None = field(default=None, kw_only=True)
    """The server's own bound of an image's pixels. None: the model's holds alone."""

    @abstractmethod
    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to. Raises ValueError."""

    @abstractmethod
    def layout(self, rows: int, columns: int) -> list[int | None]:
        """Return the ids of an image's tokens; None: one with a feature."""

    @abstractmethod
    def num_positions(self, rows: int, columns: int) -> int:
        """Return ``Image.num_positions``."""

    @property
    @abstractmethod
    def least(self) -> int:
        """Pixels that each image has at least."""

    def bounded_by(self, bound: int | None) -> Self:
        """Return the rules of a server with a bound of its own. Raises ValueError."""
        if bound is not None and bound < self.least:
            raise ValueError(f"--image-max-pixels {bound}: the model's images have {self.least} or more")
        return replace(self, bound=bound)

    def bounded_size(self, height: int, width: int) -> tuple[int, int]:
        """Return ``size`` within ``bound``, of an image that a request has room for. Raises ValueError."""
        to_height, to_width = self.size(height, width)
        if self.bound is not None and to_height * to_width > self.bound:
            to_height, to_width = self._shrunk(height, width, self.bound)
        if to_height * to_width > MOST_PIXELS:
            raise ValueError(f"it would have {to_height} x {to_width} pixels for the model, too many")
        return to_height, to_width

    def _shrunk(self, height: int, width: int, bound: int) -> tuple[int, int]:
        """Return a size of at most ``bound`` pixels, about of an image's shape."""
        shrink, most = math.sqrt(height * width / bound), bound // self.side**2
        rows = min(most, max(1, math.floor(height / shrink / self.side)))
        columns = min(most // rows, max(1, math.floor(width / shrink / self.side)))
        return rows * self.side, columns * self.side


@dataclass(frozen=True, slots=True)
class QwenImages(ImageRules):
    """Qwen2.5-VL, Qwen3-VL, Qwen3.5: pixels within bounds, and rope positions in rows and columns."""

    least_pixels: int
    most_pixels: int

    @property
    def least(self) -> int:
        return self.least_pixels

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

    def layout(self, rows: int, columns: int) -> list[int | None]:
        return [None] * (rows * columns)

    def num_positions(self, rows: int, columns: int) -> int:
        return max(rows, columns)


@dataclass(frozen=True, slots=True)
class PixtralImages(ImageRules):
    """Mistral 3: images are only made smaller, and tokens mark the ends of rows and of the image."""

    most_height: int
    most_width: int
    row_end: int
    image_end: int

    @property
    def least(self) -> int:
        return self.side * self.side

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

    def num_positions(self, rows: int, columns: int) -> int:
        return 0


def image_rules(
    config: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    processor: Mapping[str, Any],
    id_of: Callable[[str], int | None],
) -> ImageRules | NoImages:
    """Return the rules by the contents of config.json, preprocessor_config.json and processor_config.json.

    ``id_of`` returns a token's id.
    """
    family, nested = config.get("model_type"), processor.get("image_processor")
    options = nested if isinstance(nested, dict) else preprocessor
    if config.get("vision_config") is None:
        return NoImages()
    if family not in (*QWEN_PATCHES, "mistral3"):
        return NoImages(f"images are not built for {family!r}")
    for name, built in FIXED.items():
        if (asked := options.get(name)) not in (None, built):
            return NoImages(f"its image processor has {name} {asked!r}, which is not built")
    try:
        if family == "mistral3":
            return _pixtral(config, options, processor, id_of)
        return _qwen(config, options, QWEN_PATCHES[family], id_of)
    except ValueError as error:
        return NoImages(str(error))


def _qwen(
    config: Mapping[str, Any], options: Mapping[str, Any], patch: int, id_of: Callable[[str], int | None]
) -> QwenImages:
    vision = _object(config, "vision_config")
    patch, merge = _number(vision, "patch_size", patch), _number(vision, "spatial_merge_size", 2)
    _check_same(options, {"patch_size": patch, "merge_size": merge})
    size = _object(options, "size")
    least = _number(options, "min_pixels", _number(size, "shortest_edge", 56 * 56))
    most = _number(options, "max_pixels", _number(size, "longest_edge", 28 * 28 * 1280))
    if least > most:
        raise ValueError(f"the image processor's bounds are {least} and {most} pixels; the first is larger")
    token = "<|image_pad|>"
    return QwenImages(token, _id(config, token, id_of), patch * merge, least, most)


def _pixtral(
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    processor: Mapping[str, Any],
    id_of: Callable[[str], int | None],
) -> PixtralImages:
    vision = _object(config, "vision_config")
    patch, merge = _number(vision, "patch_size", 16), _number(config, "spatial_merge_size", 2)
    _check_same(processor, {"patch_size": patch, "spatial_merge_size": merge})
    size, side = _object(options, "size"), patch * merge
    longest = _number(size, "longest_edge", 1024)
    height, width = (longest if "longest_edge" in size else _number(size, of, longest) for of in SIDES)
    largest = _number(vision, "image_size", 1024)
    if -(-max(height, width) // side) * side > largest:
        raise ValueError(f"its image processor allows {max(height, width)} pixels, its tower {largest}")
    token, ends = "[IMG]", [id_of(end) for end in ("[IMG_BREAK]", "[IMG_END]")]
    if None in ends:
        raise ValueError("its tokenizer has no [IMG_BREAK] or no [IMG_END]")
    row_end, image_end = (end or 0 for end in ends)
    return PixtralImages(
        token, _id(config, token, id_of), side, height, width, row_end=row_end, image_end=image_end
    )


SIDES = ("height", "width")


def _id(config: Mapping[str, Any], token: str, id_of: Callable[[str], int | None]) -> int:
    """Return the id of the token that stands for an image."""
    named = config.get("image_token_id", config.get("image_token_index"))
    if (found := id_of(token)) is None or named not in (None, found):
        raise ValueError(f"its tokenizer has {token} as {found}, its config.json as {named}")
    return found


def _check_same(options: Mapping[str, Any], vision: Mapping[str, int]) -> None:
    for name, value in vision.items():
        if (asked := options.get(name)) not in (None, value, {"height": value, "width": value}):
            raise ValueError(f"its image processor has {name} {asked!r}, its config.json {value}")


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object; empty where it is left out. Raises ValueError."""
    found = values.get(name)
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{name} must be an object, not {found!r}")
    return found or {}


def _number(values: Mapping[str, Any], name: str, default: int) -> int:
    """Return a whole number above 0. Raises ValueError."""
    found = default if values.get(name) is None else values[name]
    if type(found) is not int or not 0 < found < 1 << 31:
        raise ValueError(f"{name} must be a whole number above 0, not {found!r}")
    return found
