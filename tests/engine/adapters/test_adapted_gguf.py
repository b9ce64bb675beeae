"""Adapters have transformers' order of rows, also where a GGUF file has another."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.adapters.test_adapted_models import Adapted, answers, make_runner, place
from engine.gguf.test_gguf_models import make


@pytest.mark.parametrize("family", ["llama3", "smollm3", "glm4", "phi3"])
def test_a_gguf_file(family: str, tmp_path: Path) -> None:
    """Its pairs side by side; the same with layers without rope; as in transformers; halves apart."""
    (tmp_path / "model").mkdir()
    folder, reference = make(tmp_path / "model", family)
    adapted = Adapted(reference, tmp_path)
    for settings in ({}, {"tensor_parallel_size": 2, "exact": True}):
        runner = make_runner(folder, **settings)
        place(runner, tmp_path)
        found = answers(runner, adapted.contents)
        assert found == adapted.greedy(found), settings
