"""The bytes of each token, and the most bytes that one token stands for, read from a tokenizer's file.

Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece-style BPE with byte fallback (Llama 2, Mistral) have a
table of each token's bytes from which text can be joined.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer as FastTokenizer

COMPOSITION = 3
"""NFC makes a text at most this many times shorter, in bytes: three conjoining Hangul letters of three bytes
each become one of three."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Every token's bytes, by id.

    ``texts`` holds the same as text: None if the bytes are not whole characters, "" for special tokens.
    ``tabular`` is False if bytes alone do not define how tokens join; then only log probabilities use it.
    """

    pieces: list[bytes]
    texts: list[str | None]
    special: frozenset[int]
    drops_leading_space: bool
    tabular: bool

    @classmethod
    def of(cls, fast: FastTokenizer, vocab_size: int = 0) -> TokenTable:
        """Return a tokenizer's table; unknown ids up to ``vocab_size`` are empty."""
        added = fast.get_added_tokens_decoder()
        names = {token_id: name for name, token_id in fast.get_vocab(with_added_tokens=True).items()}
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        names |= {id: fast.id_to_token(id) or "" for id in added.keys() - special}  # normalized: "▁<call>"
        size = max(vocab_size, max(names, default=-1) + 1)
        to_bytes, drops_leading_space = _join_rule(fast)
        tabular = to_bytes is not None
        pieces, texts = [b""] * size, [""] * size  # type: tuple[list[bytes], list[str | None]]
        for token_id, name in names.items():
            piece = (
                name.encode()
                if token_id in special
                else to_bytes(name)
                if to_bytes
                else fast.decode([token_id]).encode()
            )
            pieces[token_id] = piece
            texts[token_id] = "" if token_id in special else _text(piece)
        return cls(pieces, texts, special, drops_leading_space, tabular)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's own bytes; a special token's are those of its name."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def num_before(self, token_id: int, num_chars: int) -> int:
        """Return how many of the characters that came with a token stand for bytes of tokens before it, which
        it has shown to be no text."""
        own = utf_8_decode(self.token_bytes(token_id), "replace", False)[0]
        return max(0, num_chars - len(own)) if self.tabular else 0  # others' text depends on their neighbours


def _text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _join_rule(fast: FastTokenizer) -> tuple[Callable[[str], bytes] | None, bool]:
    """Return how a token's name becomes bytes (None: unknown), and whether the text loses a leading space."""
    decoder: dict[str, Any] = orjson.loads(fast.decoder.__getstate__()) if fast.decoder is not None else {}
    match decoder:
        case {"type": "ByteLevel"}:
            return _byte_level, False
        case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
            return _metaspace, scheme != "never"
        case {"type": "Sequence", "decoders": [*steps]}:
            kinds = [step["type"] for step in steps]
            replace_ok = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "} in steps
            strip_ok = (
                "Strip" not in kinds or {"type": "Strip", "content": " ", "start": 1, "stop": 0} in steps
            )
            if (
                kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
                and replace_ok
                and strip_ok
            ):
                return _sentencepiece, "Strip" in kinds
    return None, False


def _byte_alphabet() -> dict[int, str]:
    """Return GPT-2's printable stand-ins for bytes, for ``str.translate``: stand-in -> chr(byte).

    Latin-1 characters that stand for nothing map outside Latin-1: encoding a name with one then fails.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = dict.fromkeys(others, "\ufffd")
    table |= {byte: chr(byte) for byte in printable}
    table |= {0x100 + i: chr(byte) for i, byte in enumerate(others)}
    return table


_ALPHABET = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(name: str) -> bytes:
    try:
        return name.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode()  # an added token, spelled as it is


def _metaspace(name: str) -> bytes:
    return name.replace("▁", " ").encode()


def _sentencepiece(name: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else _metaspace(name)


def longest_token(fast: FastTokenizer, table: TokenTable) -> int | None:
    """Return the most bytes of a text that become one token.

    None if there is no bound: the tokenizer may drop text, or make an unknown token of it.
    """
    added = fast.get_added_tokens_decoder().values()
    if type(fast.model).__name__ != "BPE" or len({piece for piece in table.pieces if len(piece) == 1}) < 256:
        return None
    if any(token.lstrip or token.rstrip for token in added):  # takes in all white space beside it
        return None
    shrinks = 1
    for step in _steps(fast.normalizer, "normalizers"):
        if step["type"] == "NFC":
            shrinks = COMPOSITION
        elif step["type"] != "Prepend" and step != {
            "type": "Replace",
            "pattern": {"String": " "},
            "content": "▁",
        }:
            return None
    for step in _steps(fast.pre_tokenizer, "pretokenizers"):
        if (
            step["type"] not in ("ByteLevel", "Split", "Digits", "Metaspace")
            or step.get("behavior") == "Removed"
        ):
            return None
    return shrinks * max(len(piece) for piece in table.pieces)


def _steps(part: Any, parts: str) -> list[dict[str, Any]]:
    """What a normalizer or pre-tokenizer does, one after the other."""
    if part is None:
        return []
    described: dict[str, Any] = orjson.loads(part.__getstate__())
    steps: list[dict[str, Any]] = described[parts] if described["type"] == "Sequence" else [described]
    return steps
