"""How a model reranks, by its files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitserve.coordinator.text.reranking import RerankRules

TEMPLATE = (
    "{{ messages | selectattr('role', 'eq', 'query') }} {{ messages | selectattr('role', 'eq', 'document') }}"
)


def rules(
    folder: Path, tokens: dict[str, Any], template: str = TEMPLATE, activation: str | None = None
) -> RerankRules:
    kinds = {"base.models.Transformer": "", "cross_encoder.modules.LogitScore": "1_LogitScore"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    if activation:
        options = {"activation_fn": f"torch.nn.modules.{activation}", "prompts": {}}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(options))
    return RerankRules.load(folder, template, 100)


def score(rules: RerankRules, *logits: float) -> float:
    return rules.score(np.array(logits, "<f4").tobytes())


def test_yes_less_no(tmp_path: Path) -> None:
    found = rules(tmp_path, {"true_token_id": 9, "false_token_id": 4})
    assert (found.refusal, found.token_ids) == ("", (9, 4))
    assert score(found, 3.0, 1.0) == pytest.approx(1 / (1 + math.exp(-2)))
    assert score(found, -2000.0, 2000.0) == pytest.approx(0.0)
    assert score(found, 2000.0, 0.0) == 1.0


def test_yes_alone_without_bounds(tmp_path: Path) -> None:
    tokens = {"true_token_id": 9, "false_token_id": None}
    found = rules(tmp_path, tokens, activation="linear.Identity")
    assert (found.token_ids, score(found, -7.5)) == ((9,), -7.5)
    with pytest.raises(ValueError, match="not finite"):
        score(found, math.nan)


def test_what_is_not_built(tmp_path: Path) -> None:
    tokens = {"true_token_id": 9}
    assert "no role 'document'" in rules(tmp_path, tokens, "{{ query }}").refusal
    (tmp_path / "other").mkdir()
    assert "goes through" not in rules(tmp_path / "other", tokens, activation="x.Sigmoid").refusal
    (tmp_path / "third").mkdir()
    assert "through 'Tanh'" in rules(tmp_path / "third", tokens, activation="activation.Tanh").refusal


def test_any_other_folder(tmp_path: Path) -> None:
    assert RerankRules.load(tmp_path, TEMPLATE, 100).refusal.startswith("it is no reranker")


@pytest.mark.parametrize(
    "tokens", [{}, {"true_token_id": 100}, {"true_token_id": "yes"}, {"true_token_id": True}]
)
def test_tokens_that_are_none_of_the_vocabulary(tmp_path: Path, tokens: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the tokens of LogitScore are"):
        rules(tmp_path, tokens)
