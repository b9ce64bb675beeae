"""How pixels become a tower's numbers, from the folder's files for image processors. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ModelConfigError
from ..model.config_values import read_json
from ..model.model_folder import PREPROCESSOR, PROCESSOR

CHANNELS = 3
HALVES = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class PixelRules:
    """A channel's number is (pixel * factor - mean) / std."""

    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    factor: float = 1 / 255


def pixel_rules(
    folder: Path, mean: tuple[float, ...] = CLIP_MEAN, std: tuple[float, ...] = CLIP_STD
) -> PixelRules:
    """``mean`` and ``std``: where the files have none. Raises ModelConfigError."""
    given, found = image_processor(folder), PixelRules(mean, std)
    if given.get("do_rescale", True):
        found = replace(found, factor=_number("rescale_factor", given.get("rescale_factor", found.factor)))
    else:
        found = replace(found, factor=1.0)
    if not given.get("do_normalize", True):
        return replace(found, mean=(0.0,) * CHANNELS, std=(1.0,) * CHANNELS)
    mean = _channels("image_mean", given.get("image_mean", found.mean))
    std = _channels("image_std", given.get("image_std", found.std))
    if 0.0 in std:
        raise ModelConfigError(f"{PREPROCESSOR}: image_std is 0")
    return replace(found, mean=mean, std=std)


def check_sizes(folder: Path, patch_size: int, merge_size: int, num_frames: int) -> None:
    """Raises ModelConfigError where the folder's files have other sizes than config.json."""
    given = image_processor(folder)
    sizes = {"patch_size": patch_size, "merge_size": merge_size, "temporal_patch_size": num_frames}
    for key, value in sizes.items():
        if given.get(key, value) != value:
            raise ModelConfigError(
                f"{PREPROCESSOR}: {key} is {given[key]!r:.100}, config.json's vision_config has {value}"
            )


def image_processor(folder: Path) -> dict[str, Any]:
    """Return the options of the folder's image processor that are not null; empty: it names none. Raises
    ModelConfigError."""
    nested = _read(folder / PROCESSOR).get("image_processor")
    found = _read(folder / PREPROCESSOR) if nested is None else nested
    if not isinstance(found, dict):
        raise ModelConfigError(f"{PROCESSOR}: 'image_processor' must be an object")
    within = found.get("media_proc_cfg")  # Kimi's
    found = {**found, **within} if isinstance(within, dict) else found
    return {key: value for key, value in found.items() if value is not None}


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e6:
        raise ModelConfigError(f"{PREPROCESSOR}: {key!r} must be a number, found {value!r:.100}")
    return float(value)


def _channels(key: str, value: Any) -> tuple[float, ...]:
    """One number for all channels, or one for each."""
    values = value if isinstance(value, (list, tuple)) else [value] * CHANNELS
    if len(values) != CHANNELS:
        raise ModelConfigError(f"{PREPROCESSOR}: {key!r} must have 3 numbers, found {value!r:.100}")
    return tuple(_number(key, each) for each in values)
