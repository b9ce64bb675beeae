"""``--model FILE.gguf``: the file becomes a folder that stands for it, once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.gguf_checkpoints import write_gguf
from support.models import make_checkpoint

from splitserve.cli import extras
from splitserve.cli.config import ConfigError
from splitserve.cli.model_source import resolved, with_folder
from splitserve.cli.settings import ServerSettings
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.engine.gguf import folder as gguf_folder
from splitserve.engine.gguf.folder import BESIDE
from splitserve.engine.model.model_folder import check_model_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "splitserve" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Alone in its folder."""
    folder = tmp_path / "models"
    model = make_checkpoint(folder, "llama2", num_hidden_layers=1)
    path = folder / "Tiny-0.1B.Q8_0.gguf"
    write_gguf(path, model, "llama", lambda name: "Q8_0")
    for other in folder.iterdir():
        if other != path:
            other.unlink()
    return path


def test_a_file_is_read_once(file: Path, cache: Path) -> None:
    folder = resolved(str(file))
    assert folder.parent == cache
    assert check_model_folder(folder).num_layers == 1
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    assert resolved(str(file), weights=False) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
    assert not list(cache.glob("*.part"))
    os.utime(file, ns=(1, 1))  # as of another download
    assert resolved(str(file)) != folder
    assert not folder.exists()


def test_an_older_build_that_runs_keeps_its_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers start from it again."""
    older = resolved(str(file))
    monkeypatch.setattr(gguf_folder, "FORMAT", gguf_folder.FORMAT + 1)
    newer = resolved(str(file))
    assert newer != older
    assert check_model_folder(older) == check_model_folder(newer)


def test_a_coordinator_has_its_name_tokenizer_and_template(file: Path) -> None:
    settings = with_folder(ServerSettings(model=file, insecure=True), weights=False)
    assert settings.served_model_name == "Tiny-0.1B.Q8_0"
    model = ServedModel.load(settings.model, settings.served_model_name)
    assert model.tokenizer.encode(["Hi"], add_special_tokens=False) == [
        [model.tokenizer.fast.token_to_id(letter) for letter in "Hi"]
    ]
    message = {"role": "user", "content": "Hi"}
    assert model.template_for(None).render([message]) == "<bos>user: Hi\nassistant: "
    assert model.eos_token_ids == {257}


def test_the_only_file_of_a_folder_is_meant(file: Path) -> None:
    assert resolved(str(file.parent)) == resolved(str(file))
    (file.parent / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 GGUF files .Tiny-0.1B.Q8_0.gguf, b.gguf.*name one"):
        resolved(str(file.parent))
    (file.parent / "config.json").write_text("{}")
    assert resolved(str(file.parent)) == file.parent


def test_a_tokenizer_beside_it_changes_what_stands_for_it(file: Path) -> None:
    first = resolved(str(file))
    assert BESIDE[0] == "tokenizer.json"
    (file.parent / BESIDE[0]).write_text(json.dumps({"mine": 1}))
    second = resolved(str(file))
    assert second != first
    assert json.loads((second / BESIDE[0]).read_text()) == {"mine": 1}


def test_what_cannot_be_is_said(file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model .*absent.gguf: there is no such file"):
        resolved(str(file.parent / "absent.gguf"))
    with pytest.raises(ConfigError, match=r"--revision v1: .* is for models of the hub"):
        resolved(str(file), "v1")
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"--model .* is cut short or damaged \(4 bytes\)"):
        resolved(str(file))
    file.write_text("<!DOCTYPE html>")
    with pytest.raises(ConfigError, match=r"--model .* is no GGUF file: it begins with b'<!DO'"):
        resolved(str(file))
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]
    monkeypatch.setitem(extras.EXTRAS, "gguf", ("gguf_that_is_not_there",))
    with pytest.raises(ConfigError, match=r"this needs .* pip install 'splitserve\[gguf\]'"):
        resolved(str(file))
