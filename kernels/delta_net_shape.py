"""The sizes of gated delta nets; ``delta_net.py`` names the letters. Free of torch."""

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
        """Numbers of a layer's state: by key-value head, [Hv, Dk, Dv], and behind it the newest inputs of the
        convolution, [conv_size - 1, channels]."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        return state + self.channels * (self.conv_size - 1)

    @property
    def row(self) -> int:
        return self.value_dim

    def of_head(self, num_kv_heads: int) -> DeltaNetShape:
        """Raises ValueError where key-value heads do not divide the heads of the state."""
        if self.num_key_heads % num_kv_heads or self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"{self.num_value_heads} value heads on {self.num_key_heads} key heads are not shared "
                f"equally by {num_kv_heads} key-value heads of the cache"
            )
        return DeltaNetShape(
            self.num_key_heads // num_kv_heads, self.num_value_heads // num_kv_heads,
            self.key_dim, self.value_dim, self.conv_size,
        )  # fmt: skip
