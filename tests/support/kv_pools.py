"""Pools for tests of KV movers, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from splitserve.transport.movers.interface import Arrival, Pool, PutSource, PutTarget

DEADLINE_S = 60.0  # against hanging alone
NUM_BLOCKS, NUM_LAYERS, LAYER_BYTES = 64, 4, 17_500
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES  # 29 blocks in one of the small parcels of tests/transport/conftest.py
POOL_SHAPE = (NUM_BLOCKS, NUM_LAYERS, LAYER_BYTES)
SECRET = b"0123456789abcdef"


def filled_pool(num_blocks: int = NUM_BLOCKS) -> Pool:
    """Random bytes: no two blocks are alike."""
    return np.random.default_rng(0).integers(0, 256, (num_blocks, NUM_LAYERS, LAYER_BYTES), dtype=np.uint8)


def empty_pool() -> Pool:
    return np.zeros(POOL_SHAPE, dtype=np.uint8)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.001)


def arrivals(target: PutTarget, count: int, source: PutSource | None = None) -> list[Arrival]:
    """What arrives until ``count`` blocks have."""
    arrived: list[Arrival] = []

    def enough() -> bool:
        if source is not None:
            source.poll()
        arrived.extend(target.poll(4))
        return len(arrived) >= count

    until(enough)
    return arrived
