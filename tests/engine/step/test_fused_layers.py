"""A decode step whose layers run in one call has the bits of one whose kernels are called one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.batches import HandSequence, hidden_states, make_batch
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.models import make_checkpoint

from splitserve.engine.step.model_runner import ModelRunner

pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
BLOCK_SIZE = 8
FUSED = [
    "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite", "olmo2", "phi4_mini", "smollm3", "qwen2_moe",
    "gpt_oss",
]  # fmt: skip
"""Biases; norms of q and k; a sliding window; gelu and norms of outputs; scales; norms of all heads; part
of a head rotated; layers without rope; experts, one shared, beside dense layers; sinks."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FUSED)
def test_the_same_bits_and_cache(tmp_path: Path, family: str, dtype: str) -> None:
    make_checkpoint(tmp_path, family)
    runner = ModelRunner(engine_config(tmp_path, "cpu", dtype, BLOCK_SIZE, 64, max_model_len=80, exact=True))
    assert runner._model._fused is not None
    random = np.random.default_rng(4)
    sequences = [
        HandSequence(random.integers(0, VOCAB_SIZE, n).tolist(), list(range(i, 64, 8)))
        for i, n in enumerate((5, 41, 20))
    ]
    runner.execute(make_batch([(s, len(s.prompt) - 1) for s in sequences], BLOCK_SIZE))
    for s in sequences:
        s.num_computed = len(s.prompt) - 1
    batch = make_batch([(s, 1) for s in sequences], BLOCK_SIZE)
    pool, reported = runner.kv_cache.pool.clone(), []
    layers: list[int] = []

    def hidden() -> torch.Tensor:
        runner.kv_cache.pool.copy_(pool)
        with torch.inference_mode():
            return hidden_states(runner, batch, layers.append)

    for rows in (len(sequences) + 1, len(sequences)):  # the second: too few rows
        runner._model._fused.rows = rows
        reported.append((hidden(), runner.kv_cache.pool.clone()))
    assert torch.equal(reported[0][0], reported[1][0])
    assert torch.equal(reported[0][1], reported[1][1])
    num_layers = runner.config.num_layers
    assert layers == [0, num_layers - 1, num_layers, *range(num_layers + 1)]
