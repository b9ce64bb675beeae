"""What every KV mover can do. A *put* is a whole block on its way into a granted block of the peer's pool.

Pools are uint8 arrays [num_blocks, block_bytes]. Nothing here blocks; nothing is safe to use from two threads at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import zmq
from numpy.typing import NDArray

Pool: TypeAlias = NDArray[np.uint8]
Item: TypeAlias = tuple[int, int, int]
"""(position in the lease, own block, the peer's block)"""
Arrival: TypeAlias = tuple[int, int]
"""(lease, position)"""


class PutTarget(Protocol):
    """The receiving side: one per decode worker and mover."""

    one_sided: bool
    """The writer writes our memory by itself: ``poll`` tells nothing, and closing a lease does not stop a stalled writer."""

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """Readable when ``poll`` has something to do; None for a one-sided mover."""

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        """From now on accept one put for each position in ``targets``, into the own block it maps to."""

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        """Accept one more put for these positions: what came was corrupt."""

    def close(self, lease: int) -> None:
        """From now on a two-sided mover drops whatever comes for this lease."""

    def poll(self, limit: int) -> list[Arrival]:
        """Takes in up to ``limit`` parcels that have come; says which blocks now lie complete in the pool."""

    def close_all(self) -> None:
        """The end of this target."""


class PutSource(Protocol):
    """The sending side: one per prefill worker and decode worker."""

    def put(self, lease: int, secret: bytes, items: Sequence[Item]) -> None:
        """Starts sending these blocks. They must keep their content until ``poll`` has named them, or ``cancel``, or ``close``.
        Raises MoverError where the peer is known to be gone or ``items`` name blocks that do not exist."""

    def poll(self) -> list[Arrival]:
        """Keeps the transfer going; says which blocks have left since the last call."""

    def pending(self) -> int:
        """Blocks that have not left yet. Call ``poll`` soon while there are any."""

    def cancel(self, lease: int) -> None:
        """Forgets this lease: what has not left does not leave, or leaves with whatever its block then holds."""

    def close(self) -> None:
        """Ends the connection; what has not left is lost."""
