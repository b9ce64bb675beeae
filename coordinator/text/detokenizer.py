"""Incremental detokenization: each token's text as soon as it is certain.

Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece-style BPE with byte fallback (Llama 2, Mistral) are
decoded with a table of each token's bytes; any other tokenizer goes through the tokenizers library's
``DecodeStream``. Bytes of an unfinished UTF-8 character are held back until it is finished or the text ends;
the concatenation equals the decode of all tokens at once. (One exception: where a SentencePiece model emits
byte tokens that are no valid UTF-8, the library writes one U+FFFD a byte for the whole run, valid characters
before included; here they are kept.)
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 8
"""Prompt tokens that a ``DecodeStream`` starts from."""


class Detokenizer(Protocol):
    """One sequence's output."""

    def step(self, token_id: int) -> str:
        """Text that this token makes certain; may be empty."""

    def finish(self) -> str:
        """What was held back, once no token follows."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Every token's bytes, by id. ``texts`` holds the same as text, None where the bytes are not whole
    characters; special tokens have no text. ``tabular`` is False where bytes alone do not say how tokens join
    (then only log probabilities use this table)."""

    pieces: list[bytes]
    texts: list[str | None]
    special: frozenset[int]
    drops_leading_space: bool
    tabular: bool

    @classmethod
    def of(cls, fast: FastTokenizer, vocab_size: int = 0) -> TokenTable:
        """The table of a tokenizer; ids up to ``vocab_size`` that it does not know are empty."""
        names = {token_id: name for name, token_id in fast.get_vocab(with_added_tokens=True).items()}
        special = frozenset(
            token_id for token_id, added in fast.get_added_tokens_decoder().items() if added.special
        )
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
        """The token's own bytes; a special token's are those of its name."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""


def _text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _join_rule(fast: FastTokenizer) -> tuple[Callable[[str], bytes] | None, bool]:
    """How a token's name becomes bytes, and whether the text loses a leading space; None where the decoder is
    of another kind."""
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
    """GPT-2's printable stand-ins for bytes, for ``str.translate``: stand-in -> chr(byte). Latin-1 characters
    that stand for nothing map outside Latin-1, so that encoding a name that holds one fails."""
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


class TableDetokenizer:
    """By table. The usual token, whole characters after whole characters, costs one list lookup."""

    __slots__ = ("_clean", "_held", "_pieces", "_special", "_strip", "_texts")

    def __init__(self, table: TokenTable, *, at_start: bool) -> None:
        self._texts = table.texts
        self._pieces = table.pieces
        self._special = table.special
        self._held = b""
        self._strip = at_start and table.drops_leading_space
        self._clean = not self._strip  # nothing held, nothing to strip

    def step(self, token_id: int) -> str:
        if self._clean:
            text = self._texts[token_id]
            if text is not None:
                return text
        return self._slow(token_id)

    def _slow(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        piece = self._pieces[token_id]
        if self._strip and piece:
            piece = piece.removeprefix(b" ")
            self._strip = False
        data = self._held + piece
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        self._clean = not self._held and not self._strip
        return text

    def finish(self) -> str:
        text, _ = utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text


class StreamDetokenizer:
    """By the tokenizers library, for decoders that look at neighbouring tokens."""

    def __init__(self, fast: FastTokenizer, context: Sequence[int]) -> None:
        self._fast = fast
        self._context = list(context)
        self._ids: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=True)
        self._num_chars = 0

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text: str = self._stream.step(self._fast, token_id) or ""
        self._num_chars += len(text)
        return text

    def finish(self) -> str:
        before = len(self._fast.decode(self._context))
        return self._fast.decode(self._context + self._ids)[before + self._num_chars :]


def make_detokenizer(fast: FastTokenizer, table: TokenTable, prompt_ids: Sequence[int]) -> Detokenizer:
    """The right kind for this tokenizer. The prompt decides whether the output stands at the start of the
    text."""
    if not table.tabular:
        return StreamDetokenizer(fast, prompt_ids[-CONTEXT_TOKENS:])
    at_start = table.drops_leading_space and all(token_id in table.special for token_id in prompt_ids)
    return TableDetokenizer(table, at_start=at_start)


class StopStrings:
    """Cuts a growing text before the first stop string; text that may yet become one is held back."""

    __slots__ = ("_first", "_held", "_longest", "_prefixes", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        self._first = {stop[0] for stop in stops}
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """What may be shown now. Sets ``matched`` once a stop string is complete; nothing follows then."""
        if self.matched:
            return ""
        text = self._held + text
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.matched = True
            self._held = ""
            return text[: min(starts)]
        keep = self._hold_from(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back, once no text follows."""
        text, self._held = self._held, ""
        return text

    def _hold_from(self, text: str) -> int:
        """Where the longest tail begins that a stop string may begin with."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first and text[at:] in self._prefixes:
                return at
        return len(text)
