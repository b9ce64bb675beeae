"""How finely a chunk's KV blocks are cut on their way out: whole blocks when the chunk is done, or a few
layers at a time behind the computation; and the rate of the movers, on which that depends. Pure arithmetic.

The time that the transfer adds after the last layer (the exposed time) is that of the last slice: with ``n``
slices of a chunk of ``b`` bytes

    exposed(n) = b / (n * rate) + n * PUT_S,      least at  n = sqrt(b / (rate * PUT_S))

where ``rate`` is the mover's measured rate in bytes a second, and ``PUT_S`` the cost of one more put (a
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
SETTLED_BYTES = 1 << 20  # the time of a smaller burst is that of wake-ups, not of the mover


@dataclass(frozen=True, slots=True)
class LayerSlicing:
    """``block_bytes``: of all layers of one block; ``mode``: "auto" weighs size against rate, the others are
    fixed."""

    num_layers: int
    block_bytes: int
    mode: SlicingMode = "auto"

    def layers_per_put(self, num_blocks: int, rate: float) -> int:
        """Return the number of layers to wait for before these blocks' next slice leaves; ``num_layers``
        means whole blocks."""
        if self.mode == "layers":
            return 1
        if self.mode == "blocks":
            return self.num_layers
        slices = math.sqrt(num_blocks * self.block_bytes / (rate * PUT_S))
        return math.ceil(self.num_layers / min(max(slices, 1.0), self.num_layers))


WHOLE_BLOCKS = LayerSlicing(1, 1, "blocks")


def seen(rate: float | None, num_bytes: int, seconds: float) -> float:
    """Return the rate with one more transfer in it, in bytes a second."""
    newest = num_bytes / max(seconds, 1e-9)
    return newest if rate is None else rate + MEMORY * (newest - rate)


class TransferClock:
    """Times each burst of puts to a peer, from its first put until no put is pending. ``now``: seconds of one
    monotonic clock."""

    def __init__(self) -> None:
        self._bursts: dict[PeerId, tuple[float, int]] = {}
        self.num_bytes = 0
        self.seconds = 0.0

    def put(self, peer: PeerId, num_bytes: int, now: float) -> None:
        """Note that a put of this size is about to start."""
        since, before = self._bursts.get(peer, (now, 0))
        self._bursts[peer] = since, before + num_bytes

    def settled(self, peer: PeerId, now: float) -> tuple[int, float] | None:
        """Note that nothing is pending for this peer. Return (bytes, seconds) of the burst that has ended, if
        it is large enough to measure."""
        burst = self._bursts.pop(peer, None)
        if burst is None:
            return None
        since, num_bytes = burst
        self.num_bytes += num_bytes
        self.seconds += now - since
        return (num_bytes, now - since) if num_bytes >= SETTLED_BYTES else None

    def forget(self, peer: PeerId) -> None:
        """Drop the burst: the mover has failed."""
        self._bursts.pop(peer, None)
