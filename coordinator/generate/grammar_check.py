"""Grammars are compiled here once before any worker is asked: what cannot be is the client's to know, as a 400 with the reason."""

from __future__ import annotations

import re
from collections import OrderedDict
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..errors import InvalidRequest
from ..text.tokenizer import Tokenizer

MAX_REMEMBERED = 1024
MAX_LEXER_STATES = 50_000
"""As on the workers; with the library's other limits it bounds the work: a second or so for the worst."""
MAX_REASON_CHARS = 500


class GrammarCheck:
    """For one model's vocabulary. Called on threads, for a grammar may take a while."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._loaded: LLTokenizer | None = None
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._lock = Lock()

    def check(self, grammar: bytes, param: str) -> None:
        """Raises InvalidRequest with the library's reason."""
        with self._lock:
            if grammar in self._good:
                self._good.move_to_end(grammar)
                return
            tokenizer = self._loaded or self._load()
        matcher = LLMatcher(tokenizer, grammar.decode(), log_level=0, limits=LLParserLimits(max_lexer_states=MAX_LEXER_STATES))
        reason = matcher.get_error()
        if not matcher.is_error():
            matcher.compute_bitmask()
            reason = matcher.get_error() and "no text satisfies it"
        if reason:
            raise InvalidRequest(f"{param}: {_for_people(reason)}", param=param)
        with self._lock:
            self._good[grammar] = None
            if len(self._good) > MAX_REMEMBERED:
                self._good.popitem(last=False)

    def _load(self) -> LLTokenizer:
        """Which token ends an answer is the workers' business: any will do here."""
        self._loaded = LLTokenizer(self._tokenizer.fast.to_str(), n_vocab=self._vocab_size, eos_token=[0])
        return self._loaded


def _for_people(reason: str) -> str:
    """Of a regular expression only what is wrong with it: the rest shows the grammar that is made of it, which nobody has written."""
    if found := re.search(r"^error: (.+)$", reason, re.MULTILINE) if "regex parse error" in reason else None:
        return f"the regular expression cannot be read: {found[1]}"
    if found := re.match(r'at \d+\(\d+\): invalid regex ".*?" \(in regex\): ([^\n;]+)', reason):
        return f"the regular expression cannot be followed: {found[1]}"
    return reason[:MAX_REASON_CHARS].strip()
