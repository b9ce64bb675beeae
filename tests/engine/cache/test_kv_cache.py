"""The pool's layout: heads before tokens."""

from __future__ import annotations

import torch

from splitserve.engine.cache.kv_cache import KVCache, KVCacheLayout

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


def test_workers_of_another_layout_are_told_apart_by_its_description() -> None:
    """v1 had tokens before heads."""
    assert LAYOUT.description == "block-major/v2 [num_layers=2, 2, num_kv_heads=3, block_size=8, head_dim=16]"
