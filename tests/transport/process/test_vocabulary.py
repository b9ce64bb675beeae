"""The name of a vocabulary changes with its pieces and their ids, and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitserve.transport.process.vocabulary import model_size, vocabulary_name

PIECES = {"a": 0, "b": 1, "ab": 2}
BPE = {"model": {"type": "BPE", "vocab": PIECES, "merges": ["a b"]}, "added_tokens": []}


def name_of(folder: Path, tokenizer: Any, **form: Any) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, **form))
    return vocabulary_name(folder)


def test_equal_pieces_have_one_name_however_the_file_is_written(tmp_path: Path) -> None:
    name = name_of(tmp_path, BPE)
    assert len(name) == 32
    more = {"id": 3, "content": "<pad>", "special": True}
    assert name_of(tmp_path, {**BPE, "added_tokens": [more]}, indent=2) == name
    turned = dict(reversed(PIECES.items()))
    assert name_of(tmp_path, {"model": {**BPE["model"], "vocab": turned}}) == name


@pytest.mark.parametrize(
    "pieces", [{"a": 1, "b": 0, "ab": 2}, {**PIECES, "aa": 3}, {"a": 0, "c": 1, "ab": 2}]
)
def test_other_pieces_have_another_name(tmp_path: Path, pieces: dict[str, int]) -> None:
    name = name_of(tmp_path, BPE)
    assert name_of(tmp_path, {"model": {"vocab": pieces}}) not in ("", name)


def test_scores_of_unigrams_do_not_count(tmp_path: Path) -> None:
    names = {name_of(tmp_path, {"model": {"vocab": [["a", score], ["b", -2.0]]}}) for score in (0.0, -1.0)}
    names.add(name_of(tmp_path, {"model": {"vocab": [["b", 0.0], ["a", -2.0]]}}))
    assert len(names) == 2


def test_a_tokenizer_that_was_written_again_in_another_form_has_the_same_name(tmp_path: Path) -> None:
    """Libraries write a SentencePiece vocabulary as BPE or as unigrams; its workers were refused."""
    unigrams = {"model": {"type": "Unigram", "vocab": [[piece, -1.0] for piece in PIECES]}}
    assert name_of(tmp_path, unigrams) == name_of(tmp_path, BPE)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": [1]}}'])
def test_what_cannot_be_read_is_not_compared(tmp_path: Path, text: str) -> None:
    assert vocabulary_name(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_text(text)
    assert vocabulary_name(tmp_path) == ""


def test_a_gguf_files_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert name_of(tmp_path, BPE) == ""


SIZES = {"num_hidden_layers": 2, "hidden_size": 64}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({**SIZES, "model_type": "llama", "quantization_config": {}}, "2 layers of width 64"),
        ({"hidden_size": 1, "num_hidden_layers": 1, "text_config": SIZES}, "2 layers of width 64"),
        ({**SIZES, "time_step_limit": [0.0, float("inf")]}, "2 layers of width 64"),
        ({**SIZES, "hidden_size": None}, ""),
        ({"num_hidden_layers": 2}, ""),
        ([], ""),
    ],
)
def test_the_size_of_a_model(tmp_path: Path, config: Any, size: str) -> None:
    assert model_size(tmp_path) == ""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_size(tmp_path) == size
    (tmp_path / "model.gguf").touch()
    assert model_size(tmp_path) == ""
