"""Short convolutions (``kernels/short_conv.py``), as config.json gives them. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...kernels.short_conv_shape import ShortConvShape
from ..errors import ModelConfigError
from .config_values import positive_int
from .family_rules import recurrent_layers

CONV = "conv"
SHORT_CONV = "conv"
MULTIPLE = 16  # of a key-value head's channels: the widest vectors of CPUs


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """``layers``: which are short convolutions. ``bias``: of the convolution and of both projections."""

    shape: ShortConvShape
    layers: tuple[bool, ...]
    bias: bool

    def of_rank(self, num_ranks: int) -> ShortConvConfig:
        return replace(self, shape=self.shape.of_head(num_ranks))

    def expected_tensors(self, layer: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The tensors of this layer's convolution, with their shapes."""
        weights: dict[str, tuple[int, ...]] = {
            "in_proj": (self.shape.width, hidden_size),
            "conv": (self.shape.channels, 1, self.shape.conv_size),
            "out_proj": (hidden_size, self.shape.channels),
        }
        expected = {f"{layer}.{SHORT_CONV}.{name}.weight": shape for name, shape in weights.items()}
        if self.bias:
            expected |= {f"{layer}.{SHORT_CONV}.{name}.bias": shape[:1] for name, shape in weights.items()}
        return expected


def short_conv_config(config: dict[str, Any], num_layers: int, num_kv_heads: int) -> ShortConvConfig | None:
    """None where all layers have full attention. Raises ModelConfigError where a number is missing or not
    sensible."""
    layers = recurrent_layers(config, num_layers, CONV)
    if not any(layers):
        return None
    shape = ShortConvShape(positive_int(config, "hidden_size"), positive_int(config, "conv_L_cache", 3))
    if shape.conv_size < 2 or shape.channels % (MULTIPLE * num_kv_heads):
        raise ModelConfigError(
            f"config.json: short convolutions of {shape.channels} channels and {shape.conv_size} tokens "
            f"(conv_L_cache), beside {num_kv_heads} key-value heads of full attention, are not built; there "
            f"must be a multiple of {MULTIPLE} channels for each head, and two tokens or more"
        )
    return ShortConvConfig(shape, layers, bool(config.get("conv_bias")))
