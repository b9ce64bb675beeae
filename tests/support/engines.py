"""A model runner's configuration, from few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitserve.engine.cache.kv_cache import PoolAllocator
from splitserve.engine.engine_config import EngineConfig
from splitserve.engine.settings import WorkerSettings


def engine_config(
    folder: Path,
    device: str = "auto",
    dtype: str = "auto",
    block_size: int = 0,
    num_blocks: int | None = None,
    *,
    max_step_seqs: int = 0,
    max_decode_seqs: int = 0,
    max_prefill_tokens: int = 0,
    pool_allocator: PoolAllocator | None = None,
    **settings: Any,
) -> EngineConfig:
    """Return it for the checkpoint in ``folder``; ``settings``: more of WorkerSettings."""
    asked: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "block_size": block_size,
        "num_blocks": num_blocks,
        **settings,
    }
    return EngineConfig(
        WorkerSettings(model=folder, insecure=True, **asked),
        max_step_seqs,
        max_decode_seqs,
        max_prefill_tokens,
        pool_allocator,
    )
