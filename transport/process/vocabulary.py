"""Facts about a model in its small files, by which a coordinator finds workers of another one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from msgspec import DecodeError, Struct, convert
from msgspec.json import decode, encode

NAME_BYTES = 16


class _Model(Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Unigram's are a list with scores, in the order of their ids."""


class _Config(Struct):
    num_hidden_layers: int = 0
    hidden_size: int = 0
    text_config: _Config | None = None
    """The text model in one for text and images."""


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
        vocab = decode((folder / "tokenizer.json").read_bytes(), type=_File).model.vocab
    except (OSError, DecodeError, UnicodeDecodeError):
        return ""  # what reads it for its text or its grammars has a sentence for that
    by_id = enumerate(piece for piece, _ in vocab) if isinstance(vocab, list) else _by_id(vocab)
    return hashlib.blake2b(encode(list(by_id)), digest_size=NAME_BYTES).hexdigest()


def model_size(folder: Path) -> str:
    """Return the number and width of the layers in the folder's config.json, in words. Empty: it cannot be
    compared, as vocabularies cannot."""
    if any(folder.glob("*.gguf")):
        return ""
    try:
        config = convert(json.loads((folder / "config.json").read_bytes()), _Config)  # may have Infinity
    except (OSError, DecodeError, ValueError, RecursionError):
        return ""  # what reads it has a sentence for that
    of = config.text_config or config
    if not of.num_hidden_layers or not of.hidden_size:
        return ""
    return f"{of.num_hidden_layers} layers of width {of.hidden_size}"


def _by_id(vocab: dict[str, int]) -> list[tuple[int, str]]:
    return sorted((number, piece) for piece, number in vocab.items())
