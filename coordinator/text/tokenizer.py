"""The model's tokenizer: text to token ids, and token ids to text as soon as each is certain.

Encoding is the coordinator's largest single piece of work (2 to 3 ms for 2,000 tokens). ``encode_batch_fast``
releases the GIL, so for a long text a thread does it (``aside``) while the event loop goes on streaming.

A ``TableDetokenizer`` joins the bytes of tokens, and holds back those of an unfinished UTF-8 character; if
the tokenizer has no such table, the library's ``DecodeStream`` does it. The concatenation equals the decode
of all tokens at once. (One exception: where a SentencePiece model emits byte tokens that are no valid UTF-8,
the library writes one U+FFFD a byte for the whole run, valid characters before included; here they are kept.)
"""

from __future__ import annotations

import asyncio
import os
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Barrier
from typing import Any, Protocol, TypeVar

import orjson
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from .token_table import TokenTable, longest_token

T = TypeVar("T")
PIECE_CHARS = 1 << 16
"""Longer texts can be counted piece by piece: the library takes some 200 bytes of memory for each token of a
text."""
SURE_BYTES_PER_TOKEN = 6
"""A text of fewer bytes for each token that is allowed is tokenized whole: most such texts fit."""
CONTEXT_TOKENS = 8
"""Prompt tokens that a ``DecodeStream`` starts from."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Detokenizer(Protocol):
    """One sequence's output."""

    def step(self, token_id: int) -> str:
        """Return the text that this token makes certain; may be empty."""

    def finish(self) -> str:
        """Return the text that was held back, once no token follows."""


class Tokenizer:
    """A Hugging Face ``tokenizer.json`` with the names of its special tokens."""

    def __init__(
        self, fast: FastTokenizer, config: dict[str, Any] | None = None, *, vocab_size: int = 0
    ) -> None:
        fast.no_truncation()
        fast.no_padding()
        self.fast = fast
        self.config = config or {}
        self.table = TokenTable.of(fast, vocab_size)
        self.num_threads = min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="tokenizer")

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.fast, self.config, len(self.table.pieces))

    @classmethod
    def load(cls, folder: Path, *, vocab_size: int = 0) -> Tokenizer:
        """Read a checkpoint folder. Raises FileNotFoundError or ValueError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json; save the checkpoint with a fast tokenizer"
            )
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"{path} is not a tokenizer this version of tokenizers can read: {error}"
            ) from error
        return cls(fast, read_json(folder / "tokenizer_config.json"), vocab_size=vocab_size)

    def special_tokens(self) -> dict[str, str]:
        """Return ``bos_token`` and so on, as far as there are any: chat templates refer to them."""
        found = {name: self.config.get(name) for name in SPECIAL_TOKENS}
        contents = {
            name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()
        }
        return {name: value for name, value in contents.items() if isinstance(value, str)}

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token; None for an unknown name."""
        token_id = self.fast.token_to_id(name)
        return token_id if token_id in self.table.special else None

    def special_ids(self, names: Sequence[str]) -> dict[int, str]:
        """Return those of the names that are special tokens, by id."""
        return {token_id: name for name in names if (token_id := self.special_id(name)) is not None}

    def as_lark(self, mark: str) -> str:
        """Return a mark for llguidance's grammars: by number if it is a special token, otherwise as text."""
        token_id = self.special_id(mark)
        return orjson.dumps(mark).decode() if token_id is None else f"<[{token_id}]>"

    def start_threads(self) -> None:
        """Start all threads. Later the event loop would wait until a new thread gets a core: up to 0.1 s on a
        busy host. Call it only in a process that forks no more."""
        together = Barrier(self.num_threads)
        for _ in range(self.num_threads):
            self._threads.submit(together.wait)

    def aside(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``work`` on a thread, while the event loop goes on."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text.

        ``add_special_tokens`` as in Hugging Face: those of the tokenizer's post-processor, usually BOS.
        """
        encodings = self.fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def at_least(self, text: str, most: int) -> int | None:
        """Return a number of tokens above ``most`` that ``text`` has at least; None if it may have fewer.

        Takes bounded memory, and does not tokenize if every token stands for a bounded number of bytes.
        """
        num_bytes = len(text) if text.isascii() else len(text.encode(errors="replace"))
        if num_bytes <= SURE_BYTES_PER_TOKEN * most or num_bytes <= PIECE_CHARS:
            return None
        if (longest := self.longest_token) is not None and num_bytes > most * longest:
            return -(-num_bytes // longest)
        count, enough = 0, most + most // 4 + 1024  # a cut between pieces may add a token or two
        for at in range(0, len(text), PIECE_CHARS):
            count += self._count(text[at : at + PIECE_CHARS])
            if count > enough:
                return most + 1
        return None

    def ending(self, text: str, keep: int) -> str:
        """Return the end of a long text: its last ``keep`` tokens and some more."""
        at, count, enough = len(text), 0, keep + 1024  # tokens near the cut may differ from the whole text's
        while at > 0 and count < enough:
            at = max(0, at - PIECE_CHARS)
            count += self._count(text[at : at + PIECE_CHARS])
        return text[at:]

    @cached_property
    def longest_token(self) -> int | None:
        """The most bytes of a text that become one token; None if there is no bound."""
        return longest_token(self.fast, self.table)

    def _count(self, text: str) -> int:
        return len(self.fast.encode_batch_fast([text], add_special_tokens=False)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self.fast.decode(list(ids), skip_special_tokens=False)
        return text

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """Return an incremental detokenizer for the output that follows this prompt."""
        return make_detokenizer(self.fast, self.table, prompt_ids)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _unpickled(fast: FastTokenizer, config: dict[str, Any], vocab_size: int) -> Tokenizer:
    return Tokenizer(fast, config, vocab_size=vocab_size)


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty if there is no such file. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


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
    """Uses the tokenizers library, for decoders that look at neighbouring tokens."""

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
    """Return the right kind for this tokenizer. The prompt decides whether the output begins the text."""
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
        self.matched = ""  # the stop string that has cut the text

    def feed(self, text: str) -> str:
        """Return the text that may be shown now. Sets ``matched`` once a stop string is complete."""
        if self.matched:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            first, self.matched = min(found)
            self._held = ""
            return text[:first]
        keep = self._hold_from(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return the text that was held back, once no text follows."""
        text, self._held = self._held, ""
        return text

    def _hold_from(self, text: str) -> int:
        """Return the index of the longest tail with which a stop string may begin."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first and text[at:] in self._prefixes:
                return at
        return len(text)
