"""The pool's layout: heads before tokens."""

from __future__ import annotations

import torch

from splitserve.engine.cache.kv_cache import KVCache, KVCacheLayout
from splitserve.transport.messages.cache_map import Plane, num_bytes

LAYOUT = KVCacheLayout(num_layers=2, block_size=8, num_kv_heads=3, head_dim=16, dtype=torch.bfloat16)


def test_a_head_of_a_layer_is_one_run_of_a_blocks_bytes() -> None:
    cache = KVCache(LAYOUT, 4, torch.device("cpu"))
    keys_and_values = cache.pool[2, 1]
    assert keys_and_values.shape == (2, 3, 8, 16)
    keys_and_values[1, 2] = 1.0  # the last head's values
    run = 8 * 16 * 2  # bytes
    layer = cache.layer_bytes_view[2, 1]
    assert layer.shape == (6 * run,)
    assert layer[5 * run :].any()
    assert not layer[: 5 * run].any()


def test_the_cache_map_names_each_plane_of_a_block() -> None:
    plane = 3 * 8 * 16 * LAYOUT.dtype.itemsize
    assert LAYOUT.cache_map == (
        Plane(0, "key", 0, 3, 0, plane),
        Plane(0, "value", 0, 3, plane, plane),
        Plane(1, "key", 0, 3, 2 * plane, plane),
        Plane(1, "value", 0, 3, 3 * plane, plane),
    )
    assert num_bytes(LAYOUT.cache_map) == LAYOUT.block_bytes
