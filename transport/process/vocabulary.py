"""The name of a tokenizer's vocabulary, by which a coordinator finds workers of another model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msgspec import DecodeError, Struct, json

NAME_BYTES = 16


class _Model(Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Unigram's are a list with scores, in the order of their ids."""


class _File(Struct):
    model: _Model


def vocabulary_name(folder: Path) -> str:
    """Return a name for the pieces and ids of the folder's tokenizer.json: others have another name. Empty:
    it cannot be compared.

    Added tokens do not count, for a model's successors have more of them. A folder that stands for a GGUF
    file has no name: that format puts fillers of its own among the pieces.
    """
    if any(folder.glob("*.gguf")):
        return ""
    try:
        vocab = json.decode((folder / "tokenizer.json").read_bytes(), type=_File).model.vocab
    except (OSError, DecodeError, UnicodeDecodeError):
        return ""  # what reads it for its text or its grammars has a sentence for that
    by_id = enumerate(piece for piece, _ in vocab) if isinstance(vocab, list) else _by_id(vocab)
    return hashlib.blake2b(json.encode(list(by_id)), digest_size=NAME_BYTES).hexdigest()


def _by_id(vocab: dict[str, int]) -> list[tuple[int, str]]:
    return sorted((number, piece) for piece, number in vocab.items())
