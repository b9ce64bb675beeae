"""Mamba-2's layers (``kernels/delta_net.py``: its x is v there, B is k, C is q), as config.json gives them.
Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...kernels.delta_net_shape import DeltaNetShape
from ..errors import ModelConfigError
from .config_values import positive_int
from .family_rules import recurrent_layers

MAMBA = "linear_attention"
NO_LIMIT = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""The ``time_step_limit`` that limits nothing, as published and as transformers writes it."""


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """``layers``: which are Mamba-2's. ``name``: of their tensors. ``bias``: of the projections."""

    shape: DeltaNetShape
    layers: tuple[bool, ...]
    name: str
    conv_bias: bool
    bias: bool

    def of_rank(self, num_ranks: int) -> MambaConfig:
        return replace(self, shape=self.shape.of_head(num_ranks))

    def expected_tensors(self, layer: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The tensors of this layer's first half, with their shapes."""
        s = self.shape
        inner = s.num_value_heads * s.value_dim
        expected: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (s.width, hidden_size),
            "conv1d.weight": (s.channels, 1, s.conv_size),
            **dict.fromkeys(("A_log", "D", "dt_bias"), (s.num_value_heads,)),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden_size, inner),
        }
        if self.conv_bias:
            expected["conv1d.bias"] = (s.channels,)
        if self.bias:
            expected |= {"in_proj.bias": (s.width,), "out_proj.bias": (hidden_size,)}
        return {f"{layer}.{self.name}.{name}": shape for name, shape in expected.items()}


def mamba_config(name: str, config: dict[str, Any], num_layers: int, num_kv_heads: int) -> MambaConfig | None:
    """None where all layers have full attention. Raises ModelConfigError where a number is missing or not
    sensible."""
    layers = recurrent_layers(config, num_layers, MAMBA)
    if not any(layers):
        return None
    heads, given = positive_int(config, "mamba_n_heads", 128), config.get("mamba_d_head", "auto")
    inner = positive_int(config, "mamba_expand", 2) * positive_int(config, "hidden_size")
    shape = DeltaNetShape(
        num_key_heads=positive_int(config, "mamba_n_groups", 1),
        num_value_heads=heads,
        key_dim=positive_int(config, "mamba_d_state", 256),
        value_dim=inner // heads if given == "auto" else positive_int(config, "mamba_d_head"),
        conv_size=positive_int(config, "mamba_d_conv", 4),
        delta_rule=False,
    )
    if (limit := config.get("time_step_limit")) not in NO_LIMIT:
        raise ModelConfigError(f"config.json: time steps with a limit ({limit!r:.100}) are not built")
    if (given == "auto" and inner % heads) or shape.key_dim % 8 or shape.value_dim % 8 or shape.conv_size < 2:
        raise ModelConfigError(
            f"config.json: {heads} heads of {given} numbers, {shape.key_dim} numbers of state for each, and "
            f"convolutions of {shape.conv_size} tokens are not supported; multiples of 8, and 2 or more, are"
        )
    try:
        shape.of_head(num_kv_heads)
    except ValueError as error:
        raise ModelConfigError(f"config.json: layers of recurrent state: {error}") from error
    return MambaConfig(
        shape, layers, name, bool(config.get("mamba_conv_bias", True)), bool(config.get("mamba_proj_bias"))
    )
