"""Fixtures of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.cli.settings import DEMO_MODEL


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).symlink_to(DEMO_MODEL / name)
    return folder
