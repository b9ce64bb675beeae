"""How the served model takes images, by config.json and the files of the image processor beside it,
preprocessor_config.json and processor_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .families import GlmImages, InternVLImages, KimiImages, PixtralImages, QwenImages
from .reading import BICUBIC
from .rules import ImageRules, NoImages

IdOf = Callable[[str], int | None]
Read = Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], IdOf], ImageRules]
"""From config.json, the image processor's options, processor_config.json and the tokenizer. Raises
ValueError."""

QWEN_PATCHES = {"qwen2_5_vl": 14, **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), 16)}
"""The pixels of a patch's side where config.json leaves them out, by family."""
FIXED = {"do_resize": True, "resample": BICUBIC, "do_convert_rgb": True, "do_center_crop": False}
"""Options of image processors, each with the only value that is built."""


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


def _glm(
    config: Mapping[str, Any], options: Mapping[str, Any], processor: Mapping[str, Any], id_of: IdOf
) -> GlmImages:
    """The processor's bounds count the pixels of both frames that an image stands for."""
    vision, size = _object(config, "vision_config"), _object(options, "size")
    patch, merge = _number(vision, "patch_size", 14), _number(vision, "spatial_merge_size", 2)
    _check_same(options, {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2})
    least = _number(size, "shortest_edge", 112 * 112)
    most = _number(size, "longest_edge", 28 * 28 * 15000)
    if least > most or least % 2 or most % 2:
        raise ValueError(f"its image processor has bounds of {least} and {most} pixels, odd or not in order")
    token = "<|image|>"
    return GlmImages(token, _id(config, token, id_of), patch * merge, least // 2, most // 2)


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


def _internvl(
    config: Mapping[str, Any], options: Mapping[str, Any], processor: Mapping[str, Any], id_of: IdOf
) -> InternVLImages:
    vision, size = _object(config, "vision_config"), _object(options, "size")
    patch, tile = (
        _number(_single(vision, key), key, of) for key, of in (("patch_size", 14), ("image_size", 448))
    )
    sides = [_number(size, of, 384) for of in SIDES]
    if sides != [tile, tile] or tile % (2 * patch) or config.get("downsample_ratio", 0.5) != 0.5:
        raise ValueError(
            f"its image processor has size {sides}, its config.json {tile}, or another downsample_ratio"
        )
    _check_same(processor, {"image_seq_length": (tile // patch // 2) ** 2})
    token, ends = "<IMG_CONTEXT>", [id_of(end) for end in ("<img>", "</img>")]
    if None in ends:
        raise ValueError("its tokenizer has no <img> or no </img>")
    start, end = (each or 0 for each in ends)
    least, most = (_number(options, key, of) for key, of in (("min_patches", 1), ("max_patches", 12)))
    return InternVLImages(token, _id(config, token, id_of), 2 * patch, tile, least, most, start, end)


def _single(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a side that config.json may have twice, by its key."""
    given = values.get(key)
    if isinstance(given, list) and len(given) == 2 and given[0] == given[1]:
        given = given[0]
    return {key: given}


OTHERS: dict[str, Read] = {
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), _glm),
    "internvl": _internvl,
    "kimi_k25": _kimi,
    "mistral3": _pixtral,
}
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
