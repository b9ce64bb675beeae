"""The names of a checkpoint's content: the KV name and the revision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.models import make_checkpoint

from splitserve.engine.model.model_folder import content_names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama3")
    return tmp_path


def test_weights_change_both_names(folder: Path) -> None:
    first = content_names(folder)
    assert content_names(folder) == first
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][5] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    second = content_names(folder)
    assert first.kv != second.kv
    assert first.revision != second.revision


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_new_template_is_a_new_revision_and_keeps_the_caches(folder: Path, name: str) -> None:
    first = content_names(folder)
    with (folder / name).open("a") as file:
        file.write(" ")
    second = content_names(folder)
    assert first.kv == second.kv
    assert first.revision != second.revision


@pytest.mark.parametrize("name", ["quantize_config.json", "hf_quant_config.json"])
def test_how_weights_are_quantised_decides_the_bytes_of_kv(folder: Path, name: str) -> None:
    names = [content_names(folder)]
    for text in ('{"bits": 4}', '{"bits": 8}'):
        (folder / name).write_text(text)
        names.append(content_names(folder))
    assert len({found.kv for found in names}) == len({found.revision for found in names}) == 3


@pytest.mark.parametrize(
    ("changes", "decides"),
    [({"rope_theta": 12345.0}, True), ({"a_field_of_tomorrow": 1}, True), ({"eos_token_id": 3}, False)],
)
def test_of_the_configuration_only_what_may_change_kv_is_in_its_name(
    folder: Path, changes: dict[str, Any], decides: bool
) -> None:
    first = content_names(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    second = content_names(folder)
    assert (first.kv != second.kv) == decides
    assert first.revision != second.revision
