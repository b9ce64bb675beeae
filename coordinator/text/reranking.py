"""How a reranker scores documents, by the files that sentence-transformers saves beside a checkpoint.

The chat template renders a message of the role ``query`` and one of the role ``document``. The score is a
logit behind the last token: that of "yes" less that of "no", or of "yes" alone (``LogitScore``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .embeddings import MODULES, beside, kind_of, modules_of
from .tokenizer import read_json

OPTIONS = "config_sentence_transformers.json"
ROLES = ("query", "document")


@dataclass(frozen=True, slots=True)
class RerankRules:
    """``refusal``: why nothing is reranked, as a sentence; empty: the model is a reranker."""

    refusal: str = f"it is no reranker (its folder has no {MODULES} with a LogitScore)"
    token_ids: tuple[int, ...] = ()
    """"yes", and "no" where the model has it."""
    is_bounded: bool = True
    """Scores are probabilities: the sigmoid of logits."""

    @classmethod
    def load(cls, folder: Path, template: str, vocab_size: int) -> RerankRules:
        """Read a checkpoint folder; ``template``: its chat template. Raises ValueError."""
        heads = [module for module in modules_of(folder) if kind_of(module) == "LogitScore"]
        if not heads:
            return cls()
        if missing := [role for role in ROLES if role not in template]:
            return cls(f"its chat template knows no role {missing[0]!r}")
        config = read_json(beside(folder, str(heads[0].get("path", ""))) / "config.json")
        found = [config.get(name) for name in ("true_token_id", "false_token_id")]
        token_ids = tuple(token for token in found if type(token) is int and 0 <= token < vocab_size)
        if found[0] is None or len(token_ids) != len([token for token in found if token is not None]):
            raise ValueError(f"{folder / MODULES}: the tokens of LogitScore are {found}, not of {vocab_size}")
        named = str(read_json(folder / OPTIONS).get("activation_fn") or "Sigmoid").rpartition(".")[2]
        if named not in ("Sigmoid", "Identity"):
            return cls(f"its scores go through {named!r}, which is not built")
        return cls("", token_ids, named == "Sigmoid")

    def score(self, logits: bytes) -> float:
        """Return the score of float32 logits of ``token_ids``. Raises ValueError if it is not finite."""
        yes, *no = np.frombuffer(logits, "<f4").tolist()
        score = yes - sum(no)
        if not math.isfinite(score):
            raise ValueError("the model's logits have numbers that are not finite")
        return float(1 / (1 + math.exp(-max(score, -700.0)))) if self.is_bounded else float(score)
