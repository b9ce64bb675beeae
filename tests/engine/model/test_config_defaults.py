"""What config.json leaves out, or has as null, is read as by transformers' class of the family; or it is
refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.families import ALL_FAMILIES, SMALL
from support.hybrid_families import HYBRID

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.config import ModelConfig, parse_config
from splitserve.engine.model.tensors import expected_tensors

WINDOWS = {"use_sliding_window": True, "sliding_window": 24}
WITHOUT_WINDOWS = {"iquestcoder", *HYBRID}  # which are refused, or not read
OF_THE_TOKENIZER = {"eos_token_ids", "bos_token_id"}  # which has them where config.json has not
DIFFERENT = {  # reading, by family and key
    ("cwm", "rope_parameters"): "no file is without them",
    ("gpt_oss", "rope_parameters"): "no file is without them",
    ("internvl_gpt_oss", "rope_parameters"): "no file is without them",
    ("ministral3", "rope_parameters"): "no file is without them",
    ("mistral3_ministral", "rope_parameters"): "no file is without them",
    ("mistral3_mistral4", "rope_parameters"): "no file is without them",
    ("mistral4", "rope_parameters"): "no file is without them",
    ("qwen2_moe", "layer_types"): "files without it are older than transformers' rule",
    ("smollm3", "layer_types"): "files without it have no windows",
    ("phi4_mini", "original_max_position_embeddings"): "it stands among the rope parameters, too",
    ("phi4_mini_short", "original_max_position_embeddings"): "it stands among the rope parameters, too",
}


def whole(family: str, given: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers writes it in full. Raises Exception where it refuses the given one."""
    model_class, config_class, _ = ALL_FAMILIES[family]
    if "text_config" in given:
        config_class = model_class.config_class
    config = config_class(**given)
    written = config.to_dict()
    for part in ("text_config", "vision_config"):
        if part in written:
            written[part] = getattr(config, part).to_dict()
    return {**json.loads(json.dumps(written, default=str)), "architectures": [model_class.__name__]}


def lesser(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key, and a copy that lacks it or has it as null; also of the text model's and of rope's."""
    for path in ((), ("text_config",), ("rope_parameters",)):
        part = given
        for name in path:
            part = part.get(name) or {}
        for key in part.keys() - {"architectures", "model_type", "vision_config", "text_config"}:
            for null in (False, True):
                copy = json.loads(json.dumps(given))
                inner = copy[path[0]] if path else copy
                del inner[key]
                yield (
                    key,
                    {**copy, **({path[0]: {**inner, key: None}} if path else {key: None})} if null else copy,
                )


def differences(ours: ModelConfig, theirs: ModelConfig) -> dict[str, Any]:
    return {
        name: (value, getattr(theirs, name))
        for name in ModelConfig.__slots__
        if (value := getattr(ours, name)) != getattr(theirs, name) and name not in OF_THE_TOKENIZER
    }


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("family", "windows"),
    [
        (family, on)
        for family in ALL_FAMILIES
        for on in (False, True)
        if not on or family not in WITHOUT_WINDOWS
    ],
)
def test_every_key_may_be_missing(family: str, windows: bool) -> None:
    _, _, own = ALL_FAMILIES[family]
    given = whole(family, {**SMALL, **own, **(WINDOWS if windows else {})})
    found: dict[tuple[str, Any], dict[str, Any]] = {}
    for key, less in lesser(given):
        if (family, key) in DIFFERENT:
            continue
        tensors = theirs = None
        with suppress(ModelConfigError, TypeError, ZeroDivisionError):  # as the loader, which names the file
            ours = parse_config(less, {})
            tensors = expected_tensors(ours)
        if tensors is None:
            continue
        with suppress(Exception):  # transformers refuses it, or we refuse its default
            theirs = parse_config(whole(family, less), {})
        if theirs is None:
            continue
        with suppress(ModelConfigError, TypeError):
            if tensors == expected_tensors(theirs):  # else the weights do not fit
                found |= {(key, less.get(key, "missing")): differences(ours, theirs)}
    assert len(found) > 20
    assert {key: value for key, value in found.items() if value} == {}


@pytest.mark.timeout(20)
def test_a_vast_number_of_dense_layers_is_not_counted() -> None:
    """The set of their numbers filled the memory."""
    given = whole("deepseek3", {**SMALL, **ALL_FAMILIES["deepseek3"][2]})
    mixture = parse_config({**given, "first_k_dense_replace": 10**11}, {}).mixture
    assert mixture is not None
    assert not any(mixture.layers)
