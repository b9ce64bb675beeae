"""Token ids to text, as soon as each character is certain.

A ``TableDetokenizer`` joins the bytes of tokens, and holds back those of an unfinished UTF-8 character; if
the tokenizer has no such table, the library decodes the newest tokens again. The concatenation equals the
decode of all tokens at once. (One exception: where a SentencePiece model emits byte tokens that are no valid
UTF-8, the library writes one U+FFFD a byte for the whole run, valid characters before included; here they are
kept.)
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer as FastTokenizer

from .token_table import TokenTable

CONTEXT_TOKENS = 8
"""Prompt tokens that a ``StreamDetokenizer`` starts from."""


class Detokenizer(Protocol):
    """One sequence's output."""

    def step(self, token_id: int) -> str:
        """Return the text that this token makes certain; may be empty."""

    def finish(self) -> str:
        """Return the text that was held back, once no token follows."""


class TableDetokenizer:
    """Joins bytes by table. The usual token, whole characters after whole characters, costs one lookup."""

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
    """Decodes with the tokens before, for decoders that look at neighbouring tokens."""

    def __init__(self, fast: FastTokenizer, context: Sequence[int]) -> None:
        self._fast, self._ids = fast, list(context)
        self._begin, self._shown = 0, len(self._ids)  # tokens decoded again; those whose text was returned

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._more(final=False)

    def finish(self) -> str:
        return self._more(final=True)

    def _more(self, *, final: bool) -> str:
        before = self._fast.decode(self._ids[self._begin : self._shown])
        text: str = self._fast.decode(self._ids[self._begin :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return text[len(before) :]


def make_detokenizer(fast: FastTokenizer, table: TokenTable, prompt_ids: Sequence[int]) -> Detokenizer:
    """Return the right kind for this tokenizer. The prompt decides whether the output begins the text."""
    if not table.tabular:
        return StreamDetokenizer(fast, prompt_ids[-CONTEXT_TOKENS:])
    at_start = table.drops_leading_space and all(token_id in table.special for token_id in prompt_ids)
    return TableDetokenizer(table, at_start=at_start)


class MarkedDetokenizer:
    """A ``Detokenizer`` that writes out tokens that mark calls and thoughts. ``starts``: where they stand."""

    def __init__(self, inner: Detokenizer, marks: Mapping[int, str], before: str = "") -> None:
        """``before``: text whose tokens are not seen here; in it, each ``<`` may begin a mark."""
        self._inner, self._marks, self._num_chars = inner, marks, len(before)
        self.starts = {at for at, char in enumerate(before) if char == "<"}

    def step(self, token_id: int) -> str:
        mark = self._marks.get(token_id, "")
        text = self._inner.finish() if mark else self._inner.step(token_id)
        if mark:
            self.starts.add(self._num_chars + len(text))
        self._num_chars += len(text) + len(mark)
        return text + mark

    def finish(self) -> str:
        return self._inner.finish()
