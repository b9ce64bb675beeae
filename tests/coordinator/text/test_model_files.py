"""A folder's files as the coordinator reads them: as published, or refused by a sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.image_models import write_image_model

from splitserve.coordinator.errors import CannotStart
from splitserve.coordinator.text.served_model import ServedModel


def write(folder: Path, **changes: Any) -> None:
    write_image_model(folder, "qwen3_vl")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_infinity_in_a_file_as_nemotron_is_published(tmp_path: Path) -> None:
    write(tmp_path, time_step_limit=[0.0, math.inf])
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert ServedModel.load(tmp_path, "x").longest == 2048


@pytest.mark.parametrize("changes", [{"text_config": [1]}, {"text_config": {"eos_token_id": [[1]]}}])
def test_values_of_the_wrong_type(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **changes)
    with pytest.raises(CannotStart, match="a JSON file has a value of the wrong type"):
        ServedModel.load(tmp_path, "x")


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\0"])
def test_what_is_no_json(text: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CannotStart, match=r"config\.json is not valid JSON: "):
        ServedModel.load(tmp_path, "x")
