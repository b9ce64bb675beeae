"""The worker's loop follows the layers of the step that is running."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.models import make_checkpoint

from splitserve.engine.step.model_runner import ModelRunner
from splitserve.engine.step.step_progress import LayerProgress


def test_keys_and_values_are_final_when_their_layer_is_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    runner = ModelRunner(engine_config(tmp_path, device="cpu", dtype="float32", block_size=8, num_blocks=64))
    seen: list[np.ndarray] = []
    layers = runner.kv_cache.layer_bytes_view
    batch = make_batch([(HandSequence(list(range(1, 21)), [0, 1, 2]), 20)], 8)
    runner.execute(batch, on_layer=lambda n: seen.append(layers[:3, :n].copy()))
    assert [view.shape[1] for view in seen] == list(range(layers.shape[1] + 1))
    assert seen[-1].any()
    for view in seen:
        np.testing.assert_array_equal(view, layers[:3, : view.shape[1]])


def test_only_every_so_many_layers_wake_the_loop() -> None:
    for every, reported in ((0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4]), (5, [5])):
        woken: list[None] = []
        progress = LayerProgress(lambda woken=woken: woken.append(None), every)  # type: ignore[misc]
        seen = [progress.num_layers()]
        for layer in range(1, 6):
            progress.reached(layer)
            if len(woken) == len(seen):
                seen.append(progress.num_layers())
        assert seen == [0, *reported]
        assert not progress.pending


def test_several_layers_at_once_are_reported_once() -> None:
    """A graph writes half of them in one launch, which is no multiple of the group."""
    woken: list[int] = []
    progress = LayerProgress(lambda: woken.append(progress.num_layers()), 4)
    for num_layers in (3, 6, 7, 12):
        progress.reached(num_layers)
    assert woken == [6, 12]
