"""The thread that compiles grammars, while the worker's loop and its steps go on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ..errors import GrammarError
from .constraint import CompileGrammar, TokenMatcher
from .grammar import GrammarCompiler

_log = logging.getLogger(__name__)


class CompilingCore(Protocol):
    """A worker's core, as the one that asks for grammars."""

    def grammar_compiled(self, key: tuple[int, int], matcher: TokenMatcher) -> None: ...

    def grammar_failed(self, key: tuple[int, int], reason: str) -> None: ...


class _Compiled(NamedTuple):
    key: tuple[int, int]
    matcher: TokenMatcher | None
    reason: str = ""


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
            compiled = self._compile(order)
            if compiled is not None:
                self._outbox.put(compiled)
                self._wake()

    def _compile(self, order: CompileGrammar) -> _Compiled | None:
        try:
            if self._compiler is None:
                raise GrammarError("this worker serves no structured output")
            matcher = self._compiler.matcher(order.grammar, order.output_token_ids)
        except Exception as error:  # one request's, not the worker's; the thread goes on
            if not isinstance(error, GrammarError):
                _log.error("compiling a grammar failed", exc_info=error)
            return _Compiled(order.key, None, str(error)) if order.key is not None else None
        return _Compiled(order.key, matcher) if order.key is not None else None
