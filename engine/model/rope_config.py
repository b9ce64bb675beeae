"""A model's rotary parameters, as config.json gives them. Free of torch: what may be served is checked before
a worker starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelConfigError
from .config_values import MOST, positive_int

LONGEST = 1 << 24  # tokens
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary parameters of one layer. Fields that a type does not use keep their defaults.

    rotary_dim   leading numbers of a head that are rotated; 0: none
    interleaved  the numbers of a pair lie side by side in the checkpoint, instead of half of them apart
    """

    rotary_dim: int
    interleaved: bool = False
    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: interpolation begins and ends at whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: multiplies cosines and sines
    short_factors: tuple[float, ...] = ()  # longrope, by pair: for lengths up to the original one
    long_factors: tuple[float, ...] = ()
    turned: int = 0  # proportional: leading pairs that turn; the others have the angle 0
    query_beta: float = 0.0  # Llama 4: queries grow with the logarithm of their position
    axes: tuple[int, ...] = ()  # Qwen-VL: by pair, the axis whose position turns it, see ``rope_positions``

    def for_length(self, max_model_len: int) -> RopeConfig:
        """Return the parameters for sequences of up to this length. Longrope's factors differ by it, and so
        do the cached keys: one choice holds for a worker's life."""
        if self.type != "longrope" or max_model_len > self.original_max_position_embeddings:
            return self
        return replace(self, long_factors=self.short_factors)


def rope_configs(
    config: dict[str, Any],
    head_dim: int,
    windows: Sequence[int | None],
    interleaved: bool = False,
    windows_only: bool = False,
    norm_after: bool = False,
    full_head_dim: int | None = None,
) -> tuple[RopeConfig, ...]:
    """Return the rotary parameters of each layer. ``windows``: of each layer.
    ``windows_only``: layers that attend to all tokens have none. ``norm_after``: of q and k, which undoes
    YaRN's factor. ``full_head_dim``: of layers that attend to all tokens, where it is another.

    config.json has ``rope_parameters`` (transformers 5), of all layers or by their kind, or ``rope_theta``,
    ``rope_local_base_freq`` (of layers with a window) and ``rope_scaling`` (older files). Where both are
    there, ``rope_scaling`` was added by hand, for longer sequences.
    """
    scaling: dict[str, Any] = config.get("rope_scaling") or {}
    if "type" in scaling:
        scaling = {"rope_type": scaling["type"], **scaling}
    given: dict[str, Any] = config.get("rope_parameters") or scaling
    full = {**config, "rope_parameters": {**given.get("full_attention", given), **scaling}}
    local = full
    if given.get("sliding_attention"):
        local = {**config, "rope_parameters": given["sliding_attention"]}
    elif "rope_local_base_freq" in config:
        local = {"rope_theta": config["rope_local_base_freq"]}
    elif "full_attention" in given and any(window is not None for window in windows):
        raise ModelConfigError(
            "config.json: rope_parameters lack 'sliding_attention', of layers with a window"
        )
    sizes = full_head_dim or head_dim, head_dim
    kinds = [_rope_config(of, size, interleaved) for of, size in zip((full, local), sizes, strict=True)]
    if norm_after:
        kinds = [replace(kind, attention_factor=1.0) for kind in kinds]
    without = RopeConfig(0)
    rotated = config.get("no_rope_layers")  # of each layer: 1, or 0 for one without
    if rotated is None and (interval := int(config.get("no_rope_layer_interval") or 0)):
        rotated = [(i + 1) % interval for i in range(len(windows))]
    if windows_only:
        rotated = [window is not None for window in windows]
    if rotated is not None and len(rotated) != len(windows):
        raise ModelConfigError(
            f"config.json: no_rope_layers must have {len(windows)} entries, one for each layer; found "
            f"{len(rotated)}"
        )
    if thetas := config.get("layer_rope_theta"):  # Granite's, 0: none; whatever the layer attends to
        if len(thetas) != len(windows):
            raise ModelConfigError(
                f"config.json: layer_rope_theta must have {len(windows)} entries; found {len(thetas)}"
            )
        return tuple(
            replace(kinds[0], theta=_positive("layer_rope_theta", theta)) if theta else without
            for theta in thetas
        )
    return tuple(
        without if rotated is not None and not rotated[i] else kinds[window is not None]
        for i, window in enumerate(windows)
    )


def _rope_config(config: dict[str, Any], head_dim: int, interleaved: bool) -> RopeConfig:
    parameters: dict[str, Any] = config.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if "partial_rotary_factor" not in parameters and config.get("rotary_dim"):  # of MiniMax's files
        share = positive_int(config, "rotary_dim") / head_dim
    rotary_dim = int(head_dim * share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelConfigError(
            f"config.json: partial_rotary_factor {share!r:.100} must leave an even number of up to "
            f"{head_dim} rotated numbers of each head, not {rotary_dim}"
        )
    own = RopeConfig(rotary_dim, interleaved, axes=_axes(parameters, rotary_dim // 2))
    theta = _positive("rope_theta", parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind == "mrope":  # see ``axes``: on words it is the default
        kind = "default"
    if kind == "dynamic" and (alpha := parameters.get("alpha")):  # Hunyuan's, for every length
        kind, theta = "default", theta * _positive("alpha", alpha) ** (rotary_dim / (rotary_dim - 2))
    if kind not in ROPE_TYPES:
        raise ModelConfigError(
            f"config.json: rope type {kind!r} is not supported (supported: {', '.join(ROPE_TYPES)})"
        )
    own, beta = replace(own, theta=theta), float(parameters.get("llama_4_scaling_beta") or 0.0)
    if kind == "proportional":
        factor = _positive("factor", parameters.get("factor", 1.0))
        return replace(own, type=kind, rotary_dim=head_dim, turned=rotary_dim // 2, factor=factor)
    if kind == "default" and not beta:
        return own
    name = "original_max_position_embeddings"  # Phi-3's files have it outside of the rope parameters
    given = config.get(name) or parameters.get(name) or config["max_position_embeddings"]
    original = int(_positive(name, given))
    own = replace(own, type=kind, original_max_position_embeddings=original, query_beta=beta)
    if kind == "default":
        return own
    if kind == "longrope":
        return _longrope(own, parameters, config["max_position_embeddings"] / original)
    if "factor" not in parameters:
        raise ModelConfigError(f"config.json: rope type {kind!r} needs 'factor' among its rope parameters")
    factor = _positive("factor", parameters["factor"])
    return replace(
        own,
        factor=factor,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention_factor(parameters, factor) if kind == "yarn" else 1.0,
    )


def _axes(parameters: dict[str, Any], num_pairs: int) -> tuple[int, ...]:
    """Bai et al., Qwen2.5-VL, 2025: one axis behind the other. Qwen3-VL: by turns, as long as there are
    more."""
    section = parameters.get("mrope_section")
    if not isinstance(section, list) or len(section) != 3 or sum(section) != num_pairs:
        return ()
    if not parameters.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    turns = [(pair % 3, pair // 3) for pair in range(num_pairs)]
    return tuple(axis if turn < section[axis] else 0 for axis, turn in turns)


def _longrope(rope: RopeConfig, parameters: dict[str, Any], ratio: float) -> RopeConfig:
    """Ding et al., LongRoPE, 2024; the factor of cosines and sines as Phi-3's files have it. ``ratio``: of
    the longest length to the original one, which counts where no ``factor`` is given."""
    original = rope.original_max_position_embeddings
    short, long = (
        tuple(_positive(name, factor) for factor in parameters.get(name) or ())
        for name in ("short_factor", "long_factor")
    )
    if not len(short) == len(long) == rope.rotary_dim // 2:
        raise ModelConfigError(
            f"config.json: longrope needs {rope.rotary_dim // 2} factors in short_factor and in long_factor, "
            f"found {len(short)} and {len(long)}"
        )
    given = parameters.get("attention_factor")
    stretch = max(1.0, float(parameters.get("factor") or ratio))
    return replace(
        rope,
        attention_factor=float(given) if given else math.sqrt(1 + math.log(stretch) / math.log(original)),
        short_factors=short,
        long_factors=long,
    )


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < MOST:
        raise ModelConfigError(
            f"config.json: {name!r} of the rope parameters must be above 0 and below {MOST:g}, found "
            f"{value!r:.100}"
        )
    return float(value)


def rope_max_model_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The longest sequence the rotary parameters are good for.

    ``dynamic`` changes the frequencies once a sequence outgrows the trained length, and with them the keys
    that are already cached (and shared between requests): it is served up to the trained length only.
    """
    if rope.type == "yarn":
        return min(
            LONGEST, max(max_position_embeddings, int(rope.factor * rope.original_max_position_embeddings))
        )
    return max_position_embeddings


def yarn_factor(factor: float, weight: float = 1.0) -> float:
    """YaRN section 3.4: 0.1 ln(factor) + 1; DeepSeek weights the logarithm."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    turned, all_scores = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if turned and all_scores:
        return yarn_factor(factor, float(turned)) / yarn_factor(factor, float(all_scores))
    return yarn_factor(factor)
