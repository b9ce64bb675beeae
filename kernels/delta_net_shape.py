"""The sizes of gated delta nets and of Mamba-2; ``delta_net.py`` names the letters. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """One rank's heads. ``conv_size``: tokens that the convolution sees. ``delta_rule``: else Mamba-2's."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    delta_rule: bool = True

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Columns of a layer's projection: q, k, v, z, b, a; Mamba-2 has no b."""
        return self.channels + self.num_value_heads * (self.value_dim + 1 + self.delta_rule)

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
        """Several key-value heads may have the same key head. Raises ValueError where the heads of the state
        have no equal parts."""
        keys, values = self.num_key_heads, self.num_value_heads
        if (keys % num_kv_heads and num_kv_heads % keys) or values % keys or values % num_kv_heads:
            raise ValueError(
                f"{values} value heads on {keys} key heads are not shared equally by {num_kv_heads} "
                "key-value heads of the cache"
            )
        return replace(
            self, num_key_heads=max(1, keys // num_kv_heads), num_value_heads=values // num_kv_heads
        )
