"""Gated delta nets (``kernels/delta_net.py``), as config.json gives them. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...kernels.delta_net_shape import DeltaNetShape
from ..errors import ModelConfigError
from .config_values import positive_int
from .family_rules import recurrent_layers

LINEAR = "linear_attention"
DELTA_NET = "linear_attn"


@dataclass(frozen=True, slots=True)
class DeltaNetNames:
    """Names of a layer's tensors.

    projections  that make q, k, v, z, b and a. They hold these one after another; or, if they are two, by
                 head of keys: q, k, v, z of each, then b, a
    convs        the convolution of q, k and v, or one of each
    norm_eps     of the norm of heads; 0: as the other norms
    """

    projections: tuple[str, ...]
    convs: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    out: str = "out_proj"
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """``layers``: which are delta nets. ``beta_scale``: see ``DeltaNetWeights``."""

    shape: DeltaNetShape
    layers: tuple[bool, ...]
    names: DeltaNetNames
    beta_scale: float = 1.0

    def of_rank(self, num_ranks: int) -> DeltaNetConfig:
        return replace(self, shape=self.shape.of_head(num_ranks))

    @property
    def by_key_heads(self) -> bool:
        return len(self.names.projections) == 2

    def expected_tensors(self, layer: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The tensors of this layer's attention, with their shapes."""
        s, names = self.shape, self.names
        keys, values = s.num_key_heads * s.key_dim, s.num_value_heads * s.value_dim
        parts = [keys, keys, values]
        own = parts if len(names.projections) == 6 else [s.channels]
        rows = [*own, values, s.num_value_heads, s.num_value_heads]
        if self.by_key_heads:
            rows = [s.channels + values, 2 * s.num_value_heads]
        projections = dict(zip(names.projections, rows, strict=True))
        channels = [s.channels] if len(names.convs) == 1 else parts
        expected: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (size, hidden_size) for name, size in projections.items()
        }
        expected |= {
            f"{name}.weight": (size, 1, s.conv_size) for name, size in zip(names.convs, channels, strict=True)
        }
        expected |= {
            "A_log": (s.num_value_heads,),
            "dt_bias": (s.num_value_heads,),
            f"{names.norm}.weight": (s.value_dim,),
            f"{names.out}.weight": (hidden_size, values),
        }
        return {f"{layer}.{DELTA_NET}.{name}": shape for name, shape in expected.items()}


def delta_net_config(
    names: DeltaNetNames, config: dict[str, Any], num_layers: int, num_kv_heads: int
) -> DeltaNetConfig | None:
    """None where all layers have full attention. Raises ModelConfigError where a number is missing or not
    sensible."""
    layers = recurrent_layers(config, num_layers, LINEAR)
    if config.get("attn_output_gate") is False:
        raise ModelConfigError(
            "config.json: attention without a gate (attn_output_gate) is not built for this family"
        )
    if not any(layers):
        return None
    shape = DeltaNetShape(
        num_key_heads=positive_int(config, "linear_num_key_heads"),
        num_value_heads=positive_int(config, "linear_num_value_heads"),
        key_dim=positive_int(config, "linear_key_head_dim"),
        value_dim=positive_int(config, "linear_value_head_dim"),
        conv_size=positive_int(config, "linear_conv_kernel_dim"),
    )
    if (activation := config.get("hidden_activation") or config.get("hidden_act") or "silu") != "silu":
        raise ModelConfigError(
            f"config.json: linear attention with hidden_act {activation!r:.100} is not built; it must be silu"
        )
    if shape.num_value_heads % shape.num_key_heads or shape.num_key_heads % num_kv_heads:
        raise ModelConfigError(
            f"config.json: linear attention with {shape.num_value_heads} heads of values and "
            f"{shape.num_key_heads} of keys, beside {num_kv_heads} key-value heads of full attention, is not "
            "built; each number must be a multiple of the next"
        )
    if shape.key_dim % 8 or shape.value_dim % 8 or shape.conv_size < 2:
        raise ModelConfigError(
            f"config.json: linear attention with heads of {shape.key_dim} and {shape.value_dim} numbers and "
            f"convolutions of {shape.conv_size} tokens is not supported; multiples of 8, and 2 or more, are"
        )
    beta_scale = 2.0 if config.get("linear_allow_neg_eigval") else 1.0
    return DeltaNetConfig(shape, layers, names, beta_scale)
