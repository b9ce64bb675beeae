"""The model's tokenizer: text to token ids, and token ids to text as soon as each is certain.

Encoding is the coordinator's largest single piece of work (2 to 3 ms for 2,000 tokens). ``encode_batch_fast``
releases the GIL, so for a long text a thread does it (``aside``) while the event loop goes on streaming.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import orjson
from tokenizers import Tokenizer as FastTokenizer

from .detokenizer import Detokenizer, MarkedDetokenizer, make_detokenizer
from .token_table import TokenTable, longest_token

T = TypeVar("T")
PIECE_CHARS = 1 << 16
"""Longer texts can be counted piece by piece: the library takes some 200 bytes of memory for each token of a
text."""
SURE_BYTES_PER_TOKEN = 6
"""A text of fewer bytes for each token that is allowed is tokenized whole: most such texts fit."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
                f"{path} is not a tokenizer this version of tokenizers can read: {error}; "
                "download it again, or upgrade the package tokenizers"
            ) from error
        return cls(fast, read_json(folder / "tokenizer_config.json"), vocab_size=vocab_size)

    def special_tokens(self) -> dict[str, str]:
        """Return ``bos_token`` and so on, as far as there are any: chat templates refer to them."""
        found = {name: self.config.get(name) for name in SPECIAL_TOKENS}
        contents = {
            name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()
        }
        return {name: value for name, value in contents.items() if isinstance(value, str)}

    def ids_apart(self, marks: Sequence[str]) -> dict[int, str]:
        """Return the marks that are kept apart from text, by id."""
        return {int(self.fast.token_to_id(mark) or 0): mark for mark in marks if self.is_apart(mark)}

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.fast.get_added_tokens_decoder())

    def is_apart(self, mark: str) -> bool:
        """Whether llguidance keeps a mark apart from text: a special token, or an added ``<one>``."""
        token_id = self.fast.token_to_id(mark)
        bracketed = mark[0] == "<" and mark[-1] == ">"
        return token_id in self.table.special or (bracketed and token_id in self._added)

    def as_lark(self, mark: str) -> str:
        """Return a mark for llguidance's grammars: by number if it is apart from text, otherwise as text."""
        return f"<[{self.fast.token_to_id(mark)}]>" if self.is_apart(mark) else orjson.dumps(mark).decode()

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

    def part(self, text: str, keep: int) -> str:
        """Return the end of a long text: its last ``keep`` tokens and some more. Where ``keep`` is negative,
        its beginning."""
        num_chars, count = 0, 0
        while num_chars < len(text) and count < abs(keep) + 1024:  # tokens near the cut may differ
            num_chars += PIECE_CHARS
            end = len(text) - num_chars + PIECE_CHARS if keep > 0 else num_chars
            count += self._count(text[max(0, end - PIECE_CHARS) : end])
        return text[max(0, len(text) - num_chars) :] if keep > 0 else text[:num_chars]

    def beginning(self, text: str, keep: int) -> str:
        """Return the text of its first ``keep`` tokens."""
        found = self.fast.encode(self.part(text, -keep), add_special_tokens=False)
        return text if len(found.ids) <= keep else text[: found.offsets[keep - 1][1]]

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

    def detokenizer(self, prompt_ids: Sequence[int], *, special: bool = False) -> Detokenizer:
        """Return an incremental detokenizer for the output that follows this prompt. ``special``: it writes
        out special tokens, too."""
        detokenizer = make_detokenizer(self.fast, self.table, prompt_ids)
        return MarkedDetokenizer(detokenizer, self._special_texts) if special else detokenizer

    @cached_property
    def _special_texts(self) -> dict[int, str]:
        return {token_id: self.fast.id_to_token(token_id) or "" for token_id in self.table.special}

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _unpickled(fast: FastTokenizer, config: dict[str, Any], vocab_size: int) -> Tokenizer:
    return Tokenizer(fast, config, vocab_size=vocab_size)


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty if there is no such file. Published files may have Infinity, which
    is no JSON. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value
