"""How the model's embeddings are made, by the files that sentence-transformers saves beside a checkpoint.

A worker reports the last token's hidden state behind the last norm; the rest is done here. Without such files
a vector has the length 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from .tokenizer import Tokenizer, read_json

MODULES, TEXTS = "modules.json", "sentence_bert_config.json"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 32 << 20
LAST_TOKEN = "lasttoken"


@dataclass(frozen=True, slots=True)
class EmbeddingRules:
    """``refusal``: why no embeddings are served, as a sentence; empty: they are."""

    size: int = 0
    """Numbers of a whole vector; 0: not known."""
    normalised: bool = True
    """Vectors are divided by their length."""
    end: int | None = None
    """Token that ends each text, if the tokenizer has not put it there."""
    refusal: str = ""
    alone: bool = False
    """The checkpoint has no head (``lm_head``): nothing but embeddings is served."""
    longest: int | None = None
    """Tokens of the longest text; None: as the model's context."""

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> EmbeddingRules:
        """Read a checkpoint folder, whose config.json is given. Raises ValueError."""
        modules = modules_of(folder)
        kinds = [kind_of(module) for module in modules]
        refusal, longest = "", None
        if others := sorted({*kinds} - {"Transformer", "Pooling", "Normalize"}):
            refusal = f"its {MODULES} has a module {others[0]!r}, which is not built"
        if "LogitScore" in kinds:
            refusal = "it is a reranker: use /v1/rerank"
        for module, kind in zip(modules, kinds, strict=True):
            if kind == "Pooling" and (pooling := _pooling(folder, str(module.get("path", "")))) != LAST_TOKEN:
                refusal = (
                    f"it pools by {pooling}, and only the last token's hidden state is built: those of "
                    "cached tokens are not kept"
                )
            if kind == "Transformer":
                longest, lower_cases = _text_rules(folder, str(module.get("path", "")))
                if lower_cases:
                    refusal = f"its {TEXTS} asks for texts in lower case, which is not built"
        size, named = config.get("hidden_size"), config.get("architectures")
        is_base = isinstance(named, list) and [str(each).endswith("Model") for each in named] == [True]
        return cls(
            size=size if isinstance(size, int) else 0,
            normalised=not modules or "Normalize" in kinds,
            end=_end(tokenizer) if tokenizer.config.get("add_eos_token") is True else None,
            refusal=refusal,
            alone=(is_base or bool(modules))
            and not config.get("tie_word_embeddings")
            and not _has_head(folder),
            longest=longest,
        )

    def vector(self, state: bytes, dimensions: int | None) -> NDArray[np.float32]:
        """Return the embedding of a hidden state in float32, or its first ``dimensions`` numbers, which have
        the length 1 then. Raises ValueError if a number is not finite."""
        whole = np.frombuffer(state, "<f4").astype(np.float64)
        vector = whole if dimensions is None else whole[:dimensions]
        if not np.isfinite(vector).all():
            raise ValueError("the model's hidden state has numbers that are not finite")
        if (self.normalised or dimensions is not None) and (length := np.sqrt(np.square(vector).sum())):
            vector = vector / length
        return vector.astype(np.float32)

    def ended(self, token_ids: Sequence[int]) -> list[int]:
        """Return a text's tokens with the one that ends it."""
        missing = self.end is not None and list(token_ids[-1:]) != [self.end]
        return [*token_ids, *([self.end] if missing and self.end is not None else [])]


def modules_of(folder: Path) -> list[dict[str, Any]]:
    """Return the modules of sentence-transformers; none where there is no such file. Raises ValueError."""
    path = folder / MODULES
    if not path.is_file():
        return []
    try:
        modules = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{path} must hold a JSON array of objects")
    return modules


def kind_of(module: dict[str, Any]) -> str:
    """Return the name of a module's class."""
    return str(module.get("type", "")).rpartition(".")[2]


def _has_head(folder: Path) -> bool:
    """Whether the weights that are there have one of their own. Raises ValueError."""
    names: Iterable[str] = dict(read_json(folder / INDEX).get("weight_map") or {})
    if not names and (file := folder / WEIGHTS).is_file():
        with file.open("rb") as weights:
            size = int.from_bytes(weights.read(8), "little")
            header = weights.read(size) if size <= MAX_HEADER_BYTES else b""
        try:
            names = dict(orjson.loads(header))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} has no header of safetensors: {error}") from error
    return any(name.startswith("lm_head.") or ".lm_head." in name for name in names)


def _text_rules(folder: Path, path: str) -> tuple[int | None, bool]:
    """Return (tokens of the longest text, whether texts are written in lower case) of the transformer in
    ``path``. Raises ValueError."""
    found = read_json((beside(folder, path) if path else folder) / TEXTS)
    if (longest := found.get("max_seq_length")) is not None and (type(longest) is not int or longest < 1):
        raise ValueError(f"{folder / TEXTS}: max_seq_length must be a whole number above 0, not {longest!r}")
    return longest, found.get("do_lower_case") is True


def beside(folder: Path, path: str) -> Path:
    """Return the folder of a module. Raises ValueError."""
    parts = Path(path).parts
    if len(parts) != 1 or parts[0] in ("/", ".."):
        raise ValueError(f"{folder / MODULES}: the path of a module, {path!r}, is no folder beside it")
    return folder / parts[0]


def _pooling(folder: Path, path: str) -> str:
    """Return the name of the pooling in ``path``'s config.json; several are joined. Raises ValueError."""
    config = read_json(beside(folder, path) / "config.json")
    if isinstance(named := config.get("pooling_mode"), str):
        return named
    stem = "pooling_mode_"
    names = [name.removeprefix(stem) for name, on in config.items() if name.startswith(stem) and on is True]
    return " and ".join(names) or "mean_tokens"


def _end(tokenizer: Tokenizer) -> int | None:
    end = tokenizer.special_tokens().get("eos_token")
    return None if end is None else tokenizer.fast.token_to_id(end)
