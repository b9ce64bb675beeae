"""The chunk budget is what was asked for, or what suits the device."""

from __future__ import annotations

import pytest

from splitserve.worker.settings import PrefillSettings


@pytest.mark.parametrize(
    ("asked", "on_a_cpu", "on_a_gpu"),
    [({}, 512, 2048), ({"max_batch_tokens": 96}, 96, 96)],
    ids=["default", "96"],
)
def test_the_chunk_budget(asked: dict[str, int], on_a_cpu: int, on_a_gpu: int) -> None:
    settings = PrefillSettings.model_validate({"model": ".", "insecure": True, **asked})
    assert (settings.chunk_budget("cpu"), settings.chunk_budget("cuda")) == (on_a_cpu, on_a_gpu)
