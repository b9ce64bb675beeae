"""The sizes of linear attention by the gated delta rule, and where its states lie; ``delta_net.py`` names the
letters. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """One rank's heads. ``conv_size``: tokens that the convolution sees."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Columns of a layer's projection: q, k, v, z, b, a."""
        return self.channels + self.num_value_heads * (self.value_dim + 2)

    @property
    def num_floats(self) -> int:
        """Numbers of a layer's state: [Hv, Dk, Dv], and behind it the newest inputs of the convolution."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        return state + self.channels * (self.conv_size - 1)

    def of_head(self, num_kv_heads: int) -> DeltaNetShape:
        """The part that lies where one key-value head's keys and values do."""
        return DeltaNetShape(
            self.num_key_heads // num_kv_heads, self.num_value_heads // num_kv_heads,
            self.key_dim, self.value_dim, self.conv_size,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The place of a layer's state: ``count`` blocks of a table from ``first`` on, there the bytes of the
    cache's layer ``layer``.

    The part of each key-value head (``DeltaNetShape.of_head``) lies in that head's bytes, [Hv, Dk, Dv] and
    then [conv_size - 1, channels], as float32: first in the head's keys of the first block, then in its
    values, then in the next block's. A row of Dv numbers is never cut.
    """

    layer: int
    first: int
    count: int


def num_state_blocks(shape: DeltaNetShape, num_kv_heads: int, run_bytes: int) -> int:
    """Blocks for a layer's state. ``run_bytes``: of one head's keys in one block and layer. Raises ValueError
    where they would cut a row of the state, or where key-value heads do not divide the heads of the state."""
    if shape.num_key_heads % num_kv_heads or shape.num_value_heads % shape.num_key_heads:
        raise ValueError(
            f"{shape.num_value_heads} value heads on {shape.num_key_heads} key heads are not shared equally "
            f"by {num_kv_heads} key-value heads of the cache"
        )
    if run_bytes % (4 * shape.value_dim):
        raise ValueError(
            f"a block has {run_bytes} bytes of a head's keys, no multiple of {4 * shape.value_dim}"
        )
    return -(-4 * shape.of_head(num_kv_heads).num_floats // (2 * run_bytes))
