"""How finely a chunk's KV blocks are cut on their way out: whole blocks when the chunk is done, or a few
layers at a time behind the computation. Pure arithmetic.

What the transfer adds after the last layer (the exposed time) is the last slice: with ``n`` slices of a chunk
of ``b`` bytes

    exposed(n) = b / (n * rate) + n * PUT_S,      least at  n = sqrt(b / (rate * PUT_S))

where ``rate`` is what the mover was seen to make, in bytes a second, and ``PUT_S`` what one more put costs (a
wake-up of the loop and the calls). A short prompt's best ``n`` is 1: whole blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..messages.messages import PeerId

SlicingMode = Literal["auto", "layers", "blocks"]
PUT_S = 2e-4
UNSEEN_RATE = 1e9  # bytes/s, before the first transfer was timed
MEMORY = 0.2  # weight of the newest transfer in the rate


@dataclass(frozen=True, slots=True)
class LayerSlicing:
    """``block_bytes``: of all layers of one block; ``mode``: "auto" weighs by size and rate, the others do
    not ask."""

    num_layers: int
    block_bytes: int
    mode: SlicingMode = "auto"

    def layers_per_put(self, num_blocks: int, rate: float) -> int:
        """Layers to wait for before these blocks' next slice leaves; ``num_layers`` means whole blocks."""
        if self.mode == "layers":
            return 1
        if self.mode == "blocks":
            return self.num_layers
        slices = math.sqrt(num_blocks * self.block_bytes / (rate * PUT_S))
        return math.ceil(self.num_layers / min(max(slices, 1.0), self.num_layers))


WHOLE_BLOCKS = LayerSlicing(1, 1, "blocks")


def seen(rate: float | None, num_bytes: int, seconds: float) -> float:
    """The rate with one more transfer in it, in bytes a second."""
    newest = num_bytes / max(seconds, 1e-9)
    return newest if rate is None else rate + MEMORY * (newest - rate)


SETTLED_BYTES = 1 << 20  # a smaller burst tells of wake-ups, not of the mover


class TransferClock:
    """``now`` is seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._bursts: dict[PeerId, tuple[float, int]] = {}
        self.num_bytes = 0
        self.seconds = 0.0

    def put(self, peer: PeerId, num_bytes: int, now: float) -> None:
        """A put of this size is about to start."""
        since, before = self._bursts.get(peer, (now, 0))
        self._bursts[peer] = since, before + num_bytes

    def settled(self, peer: PeerId, now: float) -> tuple[int, float] | None:
        """Nothing is pending for this peer any more: (bytes, seconds) of the burst, if it was large enough to
        tell."""
        burst = self._bursts.pop(peer, None)
        if burst is None:
            return None
        since, num_bytes = burst
        self.num_bytes += num_bytes
        self.seconds += now - since
        return (num_bytes, now - since) if num_bytes >= SETTLED_BYTES else None

    def forget(self, peer: PeerId) -> None:
        """The mover has failed: this burst tells nothing."""
        self._bursts.pop(peer, None)
