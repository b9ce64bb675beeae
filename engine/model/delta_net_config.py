"""Layers of linear attention (gated delta nets; ``kernels/delta_net.py``), as config.json gives them, and the
places of their states in the KV cache. Free of torch.

The cache has layers of full attention only. A linear layer's state lies in blocks of its own, in the bytes of
the next layer of full attention: what a step has written of the first n layers of a block is final, states
included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...kernels.delta_net_shape import DeltaNetShape, StatePlace, num_state_blocks
from ..errors import ModelConfigError
from .config_values import positive_int
from .family_rules import FULL

LINEAR = "linear_attention"
DELTA_NET = "linear_attn"


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """``layers``: which are linear. ``projections``: names of the tensors that make q, k, v, z, b and a. They
    hold these one after another; or, if they are two, by head of keys: q, k, v, z of each, then b, a."""

    shape: DeltaNetShape
    layers: tuple[bool, ...]
    projections: tuple[str, ...]

    def cache_layer(self, layer: int) -> int:
        """The layer of the cache that has this layer's keys and values, or its state."""
        return self.layers[:layer].count(False)

    def of_rank(self, num_ranks: int) -> DeltaNetConfig:
        return replace(self, shape=self.shape.of_head(num_ranks))

    @property
    def by_key_heads(self) -> bool:
        return len(self.projections) == 2

    def expected_tensors(self, layer: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The tensors of this layer's attention, with their shapes."""
        s = self.shape
        values = s.num_value_heads * s.value_dim
        rows = [s.channels, values, s.num_value_heads, s.num_value_heads]
        if self.by_key_heads:
            rows = [s.channels + values, 2 * s.num_value_heads]
        projections = dict(zip(self.projections, rows, strict=True))
        expected: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (size, hidden_size) for name, size in projections.items()
        }
        expected |= {
            "conv1d.weight": (s.channels, 1, s.conv_size),
            "A_log": (s.num_value_heads,),
            "dt_bias": (s.num_value_heads,),
            "norm.weight": (s.value_dim,),
            "out_proj.weight": (hidden_size, values),
        }
        return {f"{layer}.{DELTA_NET}.{name}": shape for name, shape in expected.items()}


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Places of a sequence's states in the blocks that it has for them.

    ``num_kv_heads``: of the cache, whole or one rank's, as ``config``; each head has its part of a state.
    ``head_dim``: of the cache."""

    config: DeltaNetConfig
    num_kv_heads: int
    head_dim: int

    def num_blocks(self, block_size: int, itemsize: int) -> int:
        """Blocks for one sequence's states. ``itemsize``: bytes of a number in the cache. Raises
        ModelConfigError where blocks of this size would cut a row of the state."""
        return self._largest_group() * self._layer_blocks(block_size, itemsize)

    def place(self, layer: int, block_size: int, itemsize: int) -> StatePlace:
        """Return that of this linear layer. Raises as ``num_blocks``."""
        count = self._layer_blocks(block_size, itemsize)
        first = layer - self._first_of_group(layer)
        return StatePlace(self.config.cache_layer(layer), first * count, count)

    def _layer_blocks(self, block_size: int, itemsize: int) -> int:
        shape, run_bytes = self.config.shape, block_size * self.head_dim * itemsize
        try:
            return num_state_blocks(shape, self.num_kv_heads, run_bytes)
        except ValueError as error:
            raise ModelConfigError(
                f"--block-size {block_size} does not fit the states of linear attention: {error}; take "
                "another, such as 16 or 64"
            ) from error

    def _first_of_group(self, layer: int) -> int:
        while layer and self.config.layers[layer - 1]:
            layer -= 1
        return layer

    def _largest_group(self) -> int:
        return max(i + 1 - self._first_of_group(i) for i, linear in enumerate(self.config.layers) if linear)


def delta_net_config(
    config: dict[str, Any], projections: tuple[str, ...], num_layers: int, num_kv_heads: int
) -> DeltaNetConfig | None:
    """None where all layers have full attention. Raises ModelConfigError where a number is missing or not
    sensible."""
    layers = _linear_layers(config, num_layers)
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
    if shape.key_dim % 8 or shape.value_dim % 8:
        raise ModelConfigError(
            f"config.json: heads of linear attention of {shape.key_dim} and {shape.value_dim} numbers are "
            "not supported; both must be multiples of 8"
        )
    return DeltaNetConfig(shape, layers, projections)


def _linear_layers(config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    every = positive_int(config, "full_attention_interval", 4)
    kinds = config.get("layer_types") or [FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {FULL, LINEAR} or kinds[-1] != FULL:
        raise ModelConfigError(
            f"config.json: layer_types must name {num_layers} layers, each {LINEAR} or {FULL}, and the last "
            f"{FULL}, where the states of those before it are kept; found {len(kinds)} with "
            f"{', '.join(sorted(map(str, set(kinds))))}, the last {kinds[-1]!r:.100}"
        )
    return tuple(kind == LINEAR for kind in kinds)
