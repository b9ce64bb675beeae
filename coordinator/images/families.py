"""The images of each family: sizes, and the tokens that stand for one.

By config.json and the files of the image processor beside it, preprocessor_config.json and
processor_config.json. Sizes, resizing and tokens are those of transformers' processors that use Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...transport.messages.images import MAX_PIXEL_BYTES
from .reading import BICUBIC
from .rules import ImageRules, NoImages

IdOf = Callable[[str], int | None]
Read = Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], IdOf], ImageRules]
"""From config.json, the image processor's options, processor_config.json and the tokenizer. Raises
ValueError."""

MAX_RATIO = 200
"""The longer side of an image over its shorter one, for Qwen's models."""
QWEN_PATCHES = {"qwen2_5_vl": 14, **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), 16)}
"""The pixels of a patch's side where config.json leaves them out, by family."""
FIXED = {"do_resize": True, "resample": BICUBIC, "do_convert_rgb": True, "do_center_crop": False}
"""Options of image processors, each with the only value that is built."""


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


@dataclass(frozen=True, slots=True)
class KimiImages(ImageRules):
    """Kimi K2.5: images are only made smaller, within a number of patches and one of each side."""

    patch: int
    most_patches: int
    most_patches_a_side: int

    @property
    def least(self) -> int:
        return self.side * self.side

    def size(self, height: int, width: int) -> tuple[int, int]:
        num_patches = max(1, height // self.patch) * max(1, width // self.patch)
        most = min(self.most_patches, (self.bound or MAX_PIXEL_BYTES) // self.patch**2)
        longest = self.most_patches_a_side * self.patch
        scale = min(1.0, math.sqrt(most / num_patches), longest / height, longest / width)
        return min(longest, max(1, int(height * scale))), min(longest, max(1, int(width * scale)))

    def layout(self, rows: int, columns: int) -> list[int | None]:
        return [None] * (rows * columns)

    def num_positions(self, rows: int, columns: int) -> int:
        return 0


def image_rules(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], processor: Mapping[str, Any], id_of: IdOf
) -> ImageRules | NoImages:
    """Return the rules by the contents of config.json, preprocessor_config.json and processor_config.json.

    ``id_of`` returns a token's id.
    """
    family, nested = config.get("model_type"), processor.get("image_processor")
    options = nested if isinstance(nested, dict) else preprocessor
    if config.get("vision_config") is None:
        return NoImages()
    if family not in (*QWEN_PATCHES, *OTHERS):
        return NoImages(f"images are not built for {family!r}")
    if isinstance(options.get("media_proc_cfg"), dict):
        options = {**options, **options["media_proc_cfg"]}
    for name, built in FIXED.items():
        if (asked := options.get(name)) not in (None, built):
            return NoImages(f"its image processor has {name} {asked!r}, which is not built")
    try:
        if family in OTHERS:
            return OTHERS[family](config, options, processor, id_of)
        return _qwen(config, options, QWEN_PATCHES[family], id_of)
    except ValueError as error:
        return NoImages(str(error))


def _qwen(config: Mapping[str, Any], options: Mapping[str, Any], patch: int, id_of: IdOf) -> QwenImages:
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
    config: Mapping[str, Any], options: Mapping[str, Any], processor: Mapping[str, Any], id_of: IdOf
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


def _kimi(
    config: Mapping[str, Any], options: Mapping[str, Any], processor: Mapping[str, Any], id_of: IdOf
) -> KimiImages:
    vision = _object(config, "vision_config")
    patch, merge = _number(vision, "patch_size", 14), vision.get("merge_kernel_size", [2, 2])
    _check_same(options, {"patch_size": patch, "merge_size": 2, "merge_kernel_size": 2})
    if merge not in (2, [2, 2]) or options.get("fixed_output_tokens") is not None:
        raise ValueError("its image processor has another merge_kernel_size than 2, or fixed_output_tokens")
    size, token = _object(options, "size"), "<|media_pad|>"
    most = _number(options, "in_patch_limit", _number(options, "max_patches", 16384))
    a_side = _number(options, "patch_limit_on_one_side", _number(size, "max_height", 512))
    if a_side != _number(size, "max_width", a_side):
        raise ValueError("its image processor has size with another max_height than max_width")
    return KimiImages(token, _id(config, token, id_of), 2 * patch, patch, most, a_side)


OTHERS: dict[str, Read] = {"mistral3": _pixtral, "kimi_k25": _kimi}
SIDES = ("height", "width")


def _id(config: Mapping[str, Any], token: str, id_of: IdOf) -> int:
    """Return the id of the token that stands for an image."""
    names = ("image_token_id", "image_token_index", "media_placeholder_token_id")
    named = next((config[name] for name in names if name in config), None)
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
