"""Structured output: a grammar as masks over the vocabulary, by llguidance (its Earley parser and its lexer
of regex derivatives).

A matcher holds nothing but its place in the grammar, which the output's tokens determine: on whichever worker
a sequence goes on, its new matcher reads the tokens that there are, and is where the lost one was.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from ...transport.messages.token_rules import TokenRules
from ..errors import GrammarError
from .constraint import CompileGrammar, TokenMatcher

ANY_NUMBER = LLMatcher.grammar_from_regex("[0-9]+").encode()
MAX_CACHED = 128  # compiled grammars
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each; the library's other limits bound compiling and each step
_log = logging.getLogger(__name__)


class GrammarMatcher:
    """A ``TokenMatcher``. Not thread-safe, except for ``failure``."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._num_read = 0
        self._failed: tuple[int, str] | None = None  # after how many tokens, and why

    def failure(self, num_outputs: int) -> str:
        failed = self._failed
        return failed[1] if failed is not None and failed[0] <= num_outputs else ""

    def read(self, output_token_ids: Sequence[int]) -> None:
        """Goes on to the end of this output, of which it has read a beginning."""
        if new := list(output_token_ids[self._num_read :]):
            self._matcher.consume_tokens(new)
            self._num_read += len(new)
            self._note_failure()

    def mask(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        self.read(output_token_ids)
        words = np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._note_failure()
        return words

    def _note_failure(self) -> None:
        if self._failed is None and self._matcher.is_error():
            self._failed = self._num_read, self._matcher.get_error().partition("\n")[0]


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary; keeps the latest. Thread-safe: each
    role of a process has a thread for it."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._path, self._vocab_size, self._eos = folder / "tokenizer.json", vocab_size, sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def prepare(self) -> LLTokenizer:
        """Reads the tokenizer: up to a second, once. Raises GrammarError."""
        if self._tokenizer is None:
            if not self._path.is_file() or not self._eos:
                raise GrammarError(
                    f"structured output needs {self._path} and an eos_token_id in the model's configuration"
                )
            try:
                self._tokenizer = LLTokenizer(
                    self._path.read_text(), n_vocab=self._vocab_size, eos_token=self._eos
                )
            except Exception as error:  # the library's own are plain ones
                raise GrammarError(
                    f"{self._path} is no tokenizer that structured output can be had with: {error}"
                ) from error
        return self._tokenizer

    def warm_up(self) -> None:
        """Prepare grammars, so that the first request with one is not slower.

        A model that cannot have grammars is reported when a request asks for one."""
        try:
            self.matcher(ANY_NUMBER).mask(())
        except GrammarError as error:
            _log.info("no structured output: %s", error)

    def matcher(self, grammar: bytes, output_token_ids: Sequence[int] = ()) -> TokenMatcher:
        """At the end of this output. Raises GrammarError if there is no such grammar, or the output does not
        follow it."""
        rules = TokenRules.unpacked(grammar)
        inner = self._of_grammar(rules.grammar.encode(), output_token_ids) if rules.grammar else None
        if inner is not None and not rules.allowed and not rules.bad:
            return inner
        if not self._eos:
            raise GrammarError("rules about tokens need an eos_token_id in the model's configuration")
        return RuledMatcher(rules, self._vocab_size, self._eos, inner)

    def _of_grammar(self, grammar: bytes, output_token_ids: Sequence[int]) -> GrammarMatcher:
        matcher = GrammarMatcher(self._compile(grammar).deep_copy(), self._vocab_size)
        matcher.read(output_token_ids)
        if failure := matcher.failure(len(output_token_ids)):
            raise GrammarError(f"the output so far does not follow the grammar: {failure}")
        return matcher

    def _compile(self, grammar: bytes) -> LLMatcher:
        """One that has read nothing; its lexer knows the first step already."""
        if (compiled := self._compiled.pop(grammar, None)) is None:
            limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
            compiled = LLMatcher(self.prepare(), grammar.decode(), log_level=0, limits=limits)
            compiled.compute_bitmask()
            if compiled.is_error():
                raise GrammarError(f"the grammar does not compile: {compiled.get_error()}")
        self._compiled[grammar] = compiled  # the newest
        if len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)
        return compiled


class CompilingCore(Protocol):
    """A worker's core, as the one that asks for grammars."""

    def grammar_compiled(self, key: tuple[int, int], matcher: TokenMatcher) -> None: ...

    def grammar_failed(self, key: tuple[int, int], reason: str) -> None: ...


class _Compiled(NamedTuple):
    key: tuple[int, int]
    matcher: TokenMatcher | None
    reason: str


class GrammarThread:
    """``submit`` what the core asks for; ``wake`` is called, from the thread, when it is there; then
    ``report`` it."""

    def __init__(self, compiler: GrammarCompiler | None, wake: Callable[[], None]) -> None:
        self._compiler, self._wake = compiler, wake
        self._inbox: queue.SimpleQueue[CompileGrammar | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[_Compiled] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, order: CompileGrammar) -> None:
        """The first one starts the thread, which then reads the tokenizer."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
            self._thread.start()
        self._inbox.put(order)

    def report(self, core: CompilingCore) -> None:
        """Report to the core what has been compiled since the last call."""
        while not self._outbox.empty():
            compiled = self._outbox.get_nowait()
            if compiled.matcher is not None:
                core.grammar_compiled(compiled.key, compiled.matcher)
            else:
                core.grammar_failed(compiled.key, compiled.reason)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the grammar that it may be at."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (order := self._inbox.get()) is not None:
            matcher, reason = self._compile(order)
            if order.key is not None:
                self._outbox.put(_Compiled(order.key, matcher, reason))
                self._wake()

    def _compile(self, order: CompileGrammar) -> tuple[TokenMatcher | None, str]:
        try:
            if self._compiler is None:
                raise GrammarError("this worker serves no structured output")
            return self._compiler.matcher(order.grammar, order.output_token_ids), ""
        except Exception as error:  # one request's, not the worker's; the thread goes on
            if not isinstance(error, GrammarError):
                _log.error("compiling a grammar failed", exc_info=error)
            return None, str(error)


class RuledMatcher:
    """A ``TokenMatcher`` around another one, or alone, with the same rule about threads."""

    def __init__(
        self, rules: TokenRules, vocab_size: int, eos: Sequence[int], inner: TokenMatcher | None
    ) -> None:
        """``eos``: end tokens, which alone are allowed where the rules leave nothing."""
        self._inner, self._bad, self._vocab_size = inner, rules.bad, vocab_size
        self._allowed = self._words(rules.allowed or range(vocab_size))
        self._ends = self._words(eos)
        self._failed: int | None = None  # number of tokens after which nothing may follow

    def failure(self, num_outputs: int) -> str:
        if self._failed is not None and self._failed <= num_outputs:
            return "the tokens that are allowed leave none that may follow"
        return "" if self._inner is None else self._inner.failure(num_outputs)

    def mask(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        words = self._allowed.copy()
        if self._inner is not None:
            words &= self._inner.mask(output_token_ids)
        for *before, last in self._bad:
            if last < self._vocab_size and (not before or list(output_token_ids[-len(before) :]) == before):
                words.view(np.uint8)[last // 8] &= ~np.uint8(1 << last % 8)
        if words.any():
            return words
        if self._failed is None:
            self._failed = len(output_token_ids)
        return self._ends

    def _words(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return a mask of these tokens. [ceil(vocab_size / 32)]"""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[[token_id for token_id in token_ids if token_id < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)
