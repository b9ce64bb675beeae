"""Layers that keep a recurrent state in place of keys and values, and the places of their states in the KV
cache. Free of torch.

The cache has layers of full attention only. A recurrent layer's state lies in blocks of its own, in the bytes
of the next layer of full attention, or of the last. Where that has its share of all states already, it lies
in an earlier one: the layer with most states decides how many blocks there are. What a step has written of
the first n layers of the cache is final once their states are, too (``final_layers``).
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
        """Return that of this recurrent layer: behind those in the same layer of the cache."""
        groups = state_groups(self.config)
        own = next(i for i, group in enumerate(groups) if layer in group)
        number = groups[own].index(layer)
        return StatePlace(own, number * spaced_floats(self.config.shape, self.num_kv_heads))

    @property
    def is_spread(self) -> bool:
        """Whether a state lies in another layer than the next of full attention, or the last."""
        groups = enumerate(state_groups(self.config))
        return any(cache_layer(self.config, layer) != own for own, group in groups for layer in group)

    def _largest_group(self) -> int:
        return max(map(len, state_groups(self.config)))


def state_groups(config: RecurrentConfig) -> list[list[int]]:
    """The recurrent layers whose states lie in each layer of the cache, in order."""
    groups: list[list[int]] = [[] for _ in range(config.layers.count(False))]
    most = -(-config.layers.count(True) // len(groups))
    for layer in reversed([i for i, recurrent in enumerate(config.layers) if recurrent]):
        own = cache_layer(config, layer)
        order = (*range(own, -1, -1), *range(own + 1, len(groups)))
        next(groups[i] for i in order if len(groups[i]) < most).insert(0, layer)
    return groups


def final_layers(config: RecurrentConfig) -> list[int]:
    """By layer of the cache: how many of its first layers are final once that one's keys are written."""
    groups = state_groups(config)
    found: list[int] = []
    for layer, recurrent in enumerate(config.layers):
        if not recurrent:
            ready = [max(group, default=-1) < layer for group in groups[: len(found) + 1]]
            found.append([*ready, False].index(False))
    return found


def cache_layer(config: RecurrentConfig, layer: int) -> int:
    """The layer of the cache that has this layer's keys and values; of a recurrent one the next, or the
    last."""
    return min(config.layers[:layer].count(False), config.layers.count(False) - 1)
