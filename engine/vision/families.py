"""The vision towers that are served, by the architecture that config.json names. Free of torch.

To add one whose layers are as these are: its names, and what reads its sizes. Its features are compared with
transformers' (tests/engine/vision).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelConfigError
from ..model.config_values import positive_int
from .names import GLM, INTERNVL, KIMI, PIXTRAL, QWEN_2_5, QWEN_3, Activation, Tower, TowerNames
from .pixel_rules import CHANNELS, HALVES, check_sizes, image_processor, pixel_rules

ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


Read = Callable[[Path, dict[str, Any], dict[str, Any]], Tower]
"""From the folder, config.json, and that of the text model with its defaults. Raises ModelConfigError."""


def _read_qwen(folder: Path, config: dict[str, Any], names: TowerNames, defaults: dict[str, Any]) -> Tower:
    """What Qwen's towers share."""
    vision = {**defaults, **config["vision_config"]}
    tower = Tower(
        names=names,
        hidden_size=positive_int(vision, "hidden_size"),
        intermediate_size=positive_int(vision, "intermediate_size"),
        num_layers=positive_int(vision, "depth"),
        num_heads=positive_int(vision, "num_heads"),
        patch_size=positive_int(vision, "patch_size"),
        num_frames=positive_int(vision, "temporal_patch_size"),
        merge_size=positive_int(vision, "spatial_merge_size"),
        out_size=positive_int(vision, "out_hidden_size"),
        activation=_activation(vision["hidden_act"]),
        projector_activation="gelu",
        projector_eps=1e-6,
        projector_bias=True,
        theta=_theta(vision),
        pixels=pixel_rules(folder),
    )
    check_sizes(folder, tower.patch_size, tower.merge_size, tower.num_frames)
    return _checked(tower, vision)


def read_qwen_2_5(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> Tower:
    tower = _fitting(_read_qwen(folder, config, QWEN_2_5, QWEN_2_5_DEFAULTS), text)
    vision = {**QWEN_2_5_DEFAULTS, **config["vision_config"]}
    window = positive_int(vision, "window_size") // tower.merge_size // tower.patch_size
    if not window:
        raise _missing(f"window_size {vision['window_size']}, which is less than a row of embeddings has")
    return replace(tower, window=window, full_layers=_layers(vision["fullatt_block_indexes"], tower))


def read_qwen_3(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> Tower:
    tower = _fitting(_read_qwen(folder, config, QWEN_3, QWEN_3_DEFAULTS), text)
    vision = {**QWEN_3_DEFAULTS, **config["vision_config"]}
    places = positive_int(vision, "num_position_embeddings")
    if math.isqrt(places) ** 2 != places:
        raise _missing(f"num_position_embeddings {places}, which is no square")
    return replace(tower, grid=math.isqrt(places))


def read_qwen_3_deep(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> Tower:
    tower = read_qwen_3(folder, config, text)
    given = config["vision_config"].get("deepstack_visual_indexes", [8, 16, 24])
    deep_layers = _layers(given, tower)
    if len(deep_layers) > (layers := positive_int(text, "num_hidden_layers")):
        raise _missing(f"{len(deep_layers)} deepstack_visual_indexes for a decoder of {layers} layers")
    return replace(tower, deep_layers=deep_layers)


def read_pixtral(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> Tower:
    vision = {**PIXTRAL_DEFAULTS, **config["vision_config"]}
    if (kind := vision.get("model_type", "pixtral")) != "pixtral":
        raise _missing(f"a vision tower of type {kind!r:.100}")
    if (layer := config.get("vision_feature_layer", -1)) not in (-1, [-1]):
        raise _missing(f"vision_feature_layer {layer!r:.100} (known: -1)")
    tower = Tower(
        names=PIXTRAL,
        hidden_size=positive_int(vision, "hidden_size"),
        intermediate_size=positive_int(vision, "intermediate_size"),
        num_layers=positive_int(vision, "num_hidden_layers"),
        num_heads=positive_int(vision, "num_attention_heads"),
        patch_size=positive_int(vision, "patch_size"),
        num_frames=1,
        merge_size=positive_int({"spatial_merge_size": 2, **config}, "spatial_merge_size"),
        out_size=positive_int(text, "hidden_size"),
        activation=_activation(vision["hidden_act"]),
        projector_activation=_activation(config.get("projector_hidden_act", "gelu")),
        projector_eps=float(text.get("rms_norm_eps", 1e-6)),
        projector_bias=bool(config.get("multimodal_projector_bias", False)),
        theta=_theta(vision),
        pixels=pixel_rules(folder),
    )
    return _checked(tower, {"in_channels": vision.get("num_channels"), **vision})


def read_kimi(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> Tower:
    given = {
        key.removeprefix("vt_").removeprefix("init_"): value for key, value in config["vision_config"].items()
    }
    vision = {**KIMI_DEFAULTS, **given}
    for key, built in KIMI_FIXED.items():
        if vision.get(key, built) != built:
            raise _missing(f"{key} {vision[key]!r:.100} (known: {built!r})")
    tower = Tower(
        names=KIMI,
        hidden_size=positive_int(vision, "hidden_size"),
        intermediate_size=positive_int(vision, "intermediate_size"),
        num_layers=positive_int(vision, "num_hidden_layers"),
        num_heads=positive_int(vision, "num_attention_heads"),
        patch_size=positive_int(vision, "patch_size"),
        num_frames=1,
        merge_size=2,
        out_size=positive_int(text, "hidden_size"),
        activation=_activation(vision["hidden_act"]),
        projector_activation=_activation(vision.get("projector_hidden_act", "gelu")),
        projector_eps=float(vision.get("projector_ln_eps", config.get("projection_layer_norm_eps", 1e-5))),
        projector_bias=True,
        theta=_theta(vision),
        pixels=pixel_rules(folder, HALVES, HALVES),
        grid=positive_int(vision, "pos_emb_height"),
    )
    if positive_int(vision, "pos_emb_width") != tower.grid:
        raise _missing(f"pos_emb_height {tower.grid} with pos_emb_width {vision['pos_emb_width']}")
    check_sizes(folder, tower.patch_size, tower.merge_size, 1)
    return _checked(tower, vision)


def read_glm(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> Tower:
    vision = {**GLM_DEFAULTS, **config["vision_config"]}
    if vision.get("attention_bias"):
        raise _missing(f"attention_bias {vision['attention_bias']!r:.100}")
    if not (text.get("rope_parameters") or text.get("rope_scaling") or {}).get("mrope_section"):
        raise _missing("a text model without mrope_section")
    tower = _fitting(_read_qwen(folder, config, GLM, GLM_DEFAULTS), text)
    grid = positive_int(vision, "image_size") // tower.patch_size
    return replace(
        tower,
        names=replace(GLM, eps=float(vision["rms_norm_eps"])),
        intermediate_size=tower.out_size,
        gated_size=tower.intermediate_size,
        projector_eps=1e-5,
        grid=grid,
    )


def read_internvl(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> Tower:
    vision = {**INTERNVL_DEFAULTS, **config["vision_config"]}
    for key, built in INTERNVL_FIXED.items():
        if (found := {**config, **vision}.get(key, built)) != built:
            raise _missing(f"{key} {found!r:.100} (known: {built!r})")
    if (kind := vision["norm_type"]) not in ("layer_norm", "rms_norm"):
        raise _missing(f"norm_type {kind!r:.100}")
    names = replace(
        INTERNVL,
        eps=float(vision["layer_norm_eps"]),
        layer_norms=kind == "layer_norm",
        qkv_biases=bool(vision["attention_bias"]),
        qk_norms=INTERNVL.qk_norms if vision["use_qk_norm"] else (),
    )
    patch_size, image_size = (_square(vision, key) for key in ("patch_size", "image_size"))
    grid = image_size // patch_size
    if image_size % (2 * patch_size):
        raise _missing(f"image_size {image_size} with patch_size {patch_size}")
    tower = Tower(
        names=names,
        hidden_size=positive_int(vision, "hidden_size"),
        intermediate_size=positive_int(vision, "intermediate_size"),
        num_layers=positive_int(vision, "num_hidden_layers"),
        num_heads=positive_int(vision, "num_attention_heads"),
        patch_size=patch_size,
        num_frames=1,
        merge_size=2,
        out_size=positive_int(text, "hidden_size"),
        activation=_activation(vision["hidden_act"]),
        projector_activation=_activation(config.get("projector_hidden_act", "gelu")),
        projector_eps=1e-5,
        projector_bias=True,
        theta=0.0,
        pixels=pixel_rules(folder),
        grid=grid,
        window=grid // 2,
    )
    if (size := image_processor(folder).get("size")) not in (None, dict.fromkeys(SIDES, image_size)):
        raise _missing(f"image_size {image_size} with an image processor of size {size!r:.100}")
    return _checked(tower, {"in_channels": vision.get("num_channels"), **vision})


def _square(vision: dict[str, Any], key: str) -> int:
    """Return a side that config.json may have twice."""
    given = vision[key]
    if isinstance(given, list) and given[:1] * 2 == given:
        given = given[0]
    return positive_int({key: given}, key)


def _checked(tower: Tower, vision: dict[str, Any]) -> Tower:
    """Raises ModelConfigError where heads do not divide the size, or there are other channels than RGB."""
    if tower.hidden_size % tower.num_heads or tower.head_dim % 4:
        raise _missing(
            f"{tower.num_heads} heads for hidden_size {tower.hidden_size}; a head must have a multiple of 4"
        )
    if vision.get("head_dim") not in (None, tower.head_dim):
        raise _missing(f"head_dim {vision['head_dim']!r:.100}; of {tower.num_heads} heads: {tower.head_dim}")
    if vision.get("in_channels") not in (None, CHANNELS):
        raise _missing(f"images of {vision['in_channels']!r:.100} channels")
    return tower


def _fitting(tower: Tower, text: dict[str, Any]) -> Tower:
    if tower.out_size != (size := positive_int(text, "hidden_size")):
        raise _missing(f"out_hidden_size {tower.out_size} for a decoder of hidden_size {size}")
    return tower


def _layers(given: Any, tower: Tower) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(i) is int and 0 <= i < tower.num_layers for i in given):
        raise _missing(f"layers {given!r:.100}; there are {tower.num_layers}")
    if given != sorted(set(given)):
        raise _missing(f"layers {given!r:.100}, which are not in order")
    return tuple(given)


def _activation(name: Any) -> Activation:
    if name not in ACTIVATIONS:
        raise _missing(f"hidden_act {name!r:.100} (known: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def _theta(vision: dict[str, Any]) -> float:
    rope = vision.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise _missing(f"rope_type {rope['rope_type']!r:.100}")
    theta = float(rope.get("rope_theta", vision.get("rope_theta", 1e4)))
    if not 1 <= theta <= 1e12:
        raise _missing(f"rope_theta {theta}")
    return theta


def _missing(what: str) -> ModelConfigError:
    return ModelConfigError(f"config.json: vision_config: {what} is not built")


QWEN_2_5_DEFAULTS = {
    "hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "patch_size": 14,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 3584, "hidden_act": "silu",
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
QWEN_3_DEFAULTS = {
    "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 3584,
    "hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304,
}  # fmt: skip
GLM_DEFAULTS = {
    "hidden_size": 1536, "intermediate_size": 13696, "depth": 24, "num_heads": 12, "patch_size": 14,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 4096, "hidden_act": "silu",
    "image_size": 336, "rms_norm_eps": 1e-5,
}  # fmt: skip
SIDES = ("height", "width")
INTERNVL_DEFAULTS = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "patch_size": 14, "image_size": 448, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm", "attention_bias": False, "use_qk_norm": False,
}  # fmt: skip
INTERNVL_FIXED = {
    "use_mask_token": False, "use_mean_pooling": True, "use_absolute_position_embeddings": True,
    "downsample_ratio": 0.5, "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
}  # fmt: skip
KIMI_DEFAULTS = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
KIMI_FIXED = {
    "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed", "video_attn_type": "spatial_temporal",
}  # fmt: skip
PIXTRAL_DEFAULTS = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip
TOWERS: dict[str, Read] = {
    **dict.fromkeys((f"{of}ForConditionalGeneration" for of in ("Glm4v", "Glm4vMoe", "Glm46V")), read_glm),
    "InternVLForConditionalGeneration": read_internvl,
    "KimiK25ForConditionalGeneration": read_kimi,
    "Kimi_K25ForConditionalGeneration": read_kimi,
    "Mistral3ForConditionalGeneration": read_pixtral,
    "Qwen2_5_VLForConditionalGeneration": read_qwen_2_5,
    "Qwen3VLForConditionalGeneration": read_qwen_3_deep,
    "Qwen3VLMoeForConditionalGeneration": read_qwen_3_deep,
    "Qwen3_5ForConditionalGeneration": read_qwen_3,
    "Qwen3_5MoeForConditionalGeneration": read_qwen_3,
}
