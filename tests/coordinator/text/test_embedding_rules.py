"""How embeddings are made is read from the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.http_fakes import write_tiny_model

from splitserve.coordinator.errors import CannotStart
from splitserve.coordinator.text.embeddings import EmbeddingRules
from splitserve.coordinator.text.served_model import ServedModel

STATE = np.array([3, 4, 12, 0], np.float32).tobytes()


def module(kind: str, path: str = "") -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


def rules(folder: Path, *modules: dict[str, Any], pooling: Any = None, **config: Any) -> EmbeddingRules:
    write_tiny_model(folder)
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**old, "hidden_size": 4, **config}))
    if modules:
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return ServedModel.load(folder, "tiny").embeddings


def test_without_files_it_is_the_last_token_normalised(tmp_path: Path) -> None:
    found = rules(tmp_path)
    assert found == EmbeddingRules(size=4, alone=False)
    np.testing.assert_allclose(found.vector(STATE, None), np.array([3, 4, 12, 0]) / 13, rtol=1e-6)


LAST = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


@pytest.mark.parametrize("pooling", [LAST, {"pooling_mode": "lasttoken"}])
@pytest.mark.parametrize("normalised", [False, True])
def test_last_token(tmp_path: Path, pooling: Any, normalised: bool) -> None:
    modules = [module("Transformer"), module("Pooling", "1_Pooling")]
    modules += [module("Normalize", "2_Normalize")] if normalised else []
    found = rules(tmp_path, *modules, pooling=pooling)
    assert (found.refusal, found.normalised) == ("", normalised)
    whole = found.vector(STATE, None)
    np.testing.assert_allclose(whole, np.array([3, 4, 12, 0]) / (13 if normalised else 1), rtol=1e-6)
    np.testing.assert_allclose(found.vector(STATE, 2), [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "name"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}, "cls_token and lasttoken"),
        ({"pooling_mode": "cls"}, "cls"),
        ({}, "mean_tokens"),
    ],
)
def test_other_poolings_are_refused(tmp_path: Path, pooling: Any, name: str) -> None:
    found = rules(tmp_path, module("Transformer"), module("Pooling", "1_Pooling"), pooling=pooling)
    assert found.refusal.startswith(f"it pools by {name}, ")


def test_other_modules_are_refused(tmp_path: Path) -> None:
    found = rules(
        tmp_path, module("Transformer"), module("Pooling", "1_Pooling"), module("Dense"), pooling=LAST
    )
    assert found.refusal == "its modules.json has a module 'Dense', which is not built"


@pytest.mark.parametrize("path", ["/etc", "..", "a/b", "", "."])
def test_a_path_outside_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(CannotStart, match="is no folder beside it"):
        rules(tmp_path, module("Transformer"), module("Pooling", path))


@pytest.mark.parametrize("content", ["{", "{}", "[3]"])
def test_a_file_that_is_none(tmp_path: Path, content: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CannotStart, match=r"modules\.json"):
        ServedModel.load(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("config", "alone"),
    [
        ({"architectures": ["Qwen3Model"]}, True),
        ({"architectures": ["Qwen3Model"], "tie_word_embeddings": True}, False),
        ({"architectures": ["Qwen3ForCausalLM"]}, False),
        ({"architectures": "Qwen3Model"}, False),
        ({"architectures": ["Qwen3Model", "Qwen3Model"]}, False),
    ],
)
def test_a_base_model_serves_embeddings_alone(tmp_path: Path, config: Any, alone: bool) -> None:
    assert rules(tmp_path, **config).alone is alone


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.qweight", ""])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_checkpoint_with_a_head_of_its_own_serves_chat(tmp_path: Path, head: str, is_split: bool) -> None:
    """The files of sentence-transformers beside it are about embeddings only."""
    names = ["model.norm.weight", *([head] if head else [])]
    if is_split:
        index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file({name: np.zeros(1, np.float32) for name in names}, tmp_path / "model.safetensors")
    assert rules(tmp_path, module("Transformer")).alone is (not head)


def test_weights_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(CannotStart, match=r"model\.safetensors has no header of safetensors"):
        rules(tmp_path, module("Transformer"))


@pytest.mark.parametrize("path", ["", "0_Transformer"])
def test_the_longest_text(tmp_path: Path, path: str) -> None:
    (tmp_path / path).mkdir(exist_ok=True)
    file = tmp_path / path / "sentence_bert_config.json"
    for given, longest in ((512, 512), (None, None)):
        file.write_text(json.dumps({"max_seq_length": given, "do_lower_case": False}))
        found = rules(tmp_path, module("Transformer", path))
        assert (found.longest, found.refusal) == (longest, "")
    file.write_text(json.dumps({"do_lower_case": True}))
    asks = "its sentence_bert_config.json asks for texts in lower case, which is not built"
    assert rules(tmp_path, module("Transformer", path)).refusal == asks
    for wrong in (0, "512", True, 1.5):
        file.write_text(json.dumps({"max_seq_length": wrong}))
        with pytest.raises(CannotStart, match="max_seq_length must be a whole number above 0"):
            rules(tmp_path, module("Transformer", path))


@pytest.mark.parametrize("size", [None, "4", 4.5])
def test_a_size_that_is_none_is_not_known(tmp_path: Path, size: Any) -> None:
    assert rules(tmp_path, hidden_size=size).size == 0


def test_numbers_that_are_none_are_an_error() -> None:
    with pytest.raises(ValueError, match="not finite"):
        EmbeddingRules().vector(np.array([1, np.nan], np.float32).tobytes(), None)


def test_nothing_has_no_direction() -> None:
    assert not EmbeddingRules().vector(bytes(16), None).any()


def test_the_end_token(tmp_path: Path) -> None:
    """The tokenizer of the tests puts no EOS; where its settings ask for one, it is put once."""
    assert rules(tmp_path).ended([5, 6]) == [5, 6]
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "add_eos_token": True}))
    found = ServedModel.load(tmp_path, "tiny").embeddings
    assert found.ended([5, 6]) == [5, 6, 1]
    assert found.ended([5, 1]) == [5, 1]
