"""Layers that keep a recurrent state in place of keys and values, and the places of their states in the KV
cache. Free of torch.

The cache has layers of full attention only. A recurrent layer's state lies in blocks of its own, in the bytes
of the next layer of full attention, or of the last: what a step has written of the first n layers of a block
is final, states included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...kernels.state_shape import StatePlace, num_state_blocks, spaced_floats
from ..errors import ModelConfigError
from .delta_net_config import DeltaNetConfig
from .mamba_config import MambaConfig
from .short_conv_config import ShortConvConfig

RecurrentConfig: TypeAlias = DeltaNetConfig | MambaConfig | ShortConvConfig


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Places of a sequence's states in the blocks that it has for them.

    ``num_kv_heads``: of the cache, whole or one rank's, as ``config``; each head has its part of a state.
    ``head_dim``: of the cache."""

    config: RecurrentConfig
    num_kv_heads: int
    head_dim: int

    def num_blocks(self, block_size: int, itemsize: int) -> int:
        """Blocks for one sequence's states. ``itemsize``: bytes of a number in the cache. Raises
        ModelConfigError where blocks of this size cannot hold a row of a state."""
        run_bytes = block_size * self.head_dim * itemsize
        try:
            return num_state_blocks(self.config.shape, self.num_kv_heads, run_bytes, self._largest_group())
        except ValueError as error:
            raise ModelConfigError(
                f"--block-size {block_size} does not fit the states of recurrent layers: {error}; take "
                "another, such as 16 or 64"
            ) from error

    def place(self, layer: int) -> StatePlace:
        """Return that of this recurrent layer: behind those of its group."""
        number = self._group(layer).index(layer)
        return StatePlace(
            cache_layer(self.config, layer), number * spaced_floats(self.config.shape, self.num_kv_heads)
        )

    def _group(self, layer: int) -> list[int]:
        """The recurrent layers whose states lie in the same layer of the cache."""
        own = cache_layer(self.config, layer)
        layers = enumerate(self.config.layers)
        return [i for i, recurrent in layers if recurrent and cache_layer(self.config, i) == own]

    def _largest_group(self) -> int:
        return max(len(self._group(i)) for i in range(len(self.config.layers)))


def cache_layer(config: RecurrentConfig, layer: int) -> int:
    """The layer of the cache that has this layer's keys and values, or its state."""
    return min(config.layers[:layer].count(False), config.layers.count(False) - 1)
