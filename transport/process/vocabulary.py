"""The name of a tokenizer's vocabulary, by which a coordinator finds workers of another model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

NAME_BYTES = 16


def vocabulary_name(folder: Path) -> str:
    """Return a name for the pieces and ids of the folder's tokenizer.json: others have another name. Empty:
    it cannot be compared.

    Added tokens do not count, for a model's successors have more of them. A folder that stands for a GGUF
    file has no name: that format puts fillers of its own among the pieces.
    """
    if any(folder.glob("*.gguf")):
        return ""
    try:
        pieces = _pieces(json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""  # what reads it for its text or its grammars has a sentence for that
    return hashlib.blake2b(json.dumps(pieces).encode(), digest_size=NAME_BYTES).hexdigest()


def _pieces(vocabulary: Any) -> list[Any]:
    """By id. Unigram's are a list with scores, in the order of their ids."""
    if isinstance(vocabulary, list):
        return [(number, piece) for number, (piece, _) in enumerate(vocabulary)]
    return sorted((number, piece) for piece, number in vocabulary.items())
