"""The sizes of short convolutions (``short_conv.py``). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """One rank's channels. ``conv_size``: tokens that the convolution sees."""

    channels: int
    conv_size: int

    @property
    def width(self) -> int:
        """Columns of a layer's projection: b, c, x."""
        return 3 * self.channels

    @property
    def num_floats(self) -> int:
        """Numbers of a layer's state: by key-value head, [conv_size - 1, its channels]."""
        return self.channels * (self.conv_size - 1)

    @property
    def row(self) -> int:
        return 1

    def of_head(self, num_kv_heads: int) -> ShortConvShape:
        """Raises ValueError where key-value heads do not divide the channels."""
        if self.channels % num_kv_heads:
            raise ValueError(
                f"{self.channels} channels are not shared equally by {num_kv_heads} key-value heads"
            )
        return ShortConvShape(self.channels // num_kv_heads, self.conv_size)
