"""Tool calls in the text of an answer, in the three ways that models were taught to write them.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number; also Qwen's way
    llama3    {"name": ..., "parameters": {...}}; {...}, as the whole answer; after <|python_tag|> or not
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}

Text that begins like a call but is not one is content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Literal

from .call_scanner import SPACE, CallScanner
from .events import CallArguments, CallStarted, Content, Event, OutputParser, joined
from .markers import MarkFinder

ToolStyle = Literal["hermes", "llama3", "mistral"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
MARKS: dict[ToolStyle, tuple[str, ...]] = {
    "hermes": (OPEN, CLOSE),
    "llama3": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS, ARGS),
}
"""Marks that may be tokens of their own."""


class _Parser(ABC):
    """Reads in modes: each takes what it wants of the text and returns the rest."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """``names``: of the calls that are taken as such; None: all."""
        self._names = names
        self._events: list[Event] = []
        self._num_calls = 0
        self._scanner = CallScanner()
        self._started = False  # the client was sent the begin of the scanner's call
        self._space = ""  # white space that is content only if content follows
        self._mode: Callable[[str], str] = self._first

    def feed(self, text: str) -> list[Event]:
        """See ``OutputParser``."""
        while text:
            text = self._mode(text)
        return self._take()

    def finish(self) -> list[Event]:
        """See ``OutputParser``."""
        self._end()
        return self._take()

    @abstractmethod
    def _first(self, text: str) -> str:
        """The mode at the beginning."""

    @abstractmethod
    def _end(self) -> None:
        """Emit the text that was held back: no text follows."""

    def _take(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _content(self, text: str) -> None:
        """White space around calls is nobody's content: it waits for what follows."""
        text = self._space + text
        content = text.rstrip(SPACE)
        self._space = text[len(content) :]
        self._events.append(Content(content))

    def _emit_space(self) -> None:
        """The end: without calls it is content."""
        if self._space and not self._num_calls:
            self._events.append(Content(self._space))

    def _begin_call(self) -> None:
        self._scanner, self._started = CallScanner(self._names), False

    def _scan(self, text: str) -> str:
        """Read up to the end of the call."""
        scanner = self._scanner
        for at, char in enumerate(text):
            if scanner.over:
                self._emit_start()
                return text[at:]
            scanner.feed(char)
        self._emit_start()
        return ""

    def _emit_start(self) -> None:
        scanner = self._scanner
        if scanner.name is not None and not self._started and (arguments := scanner.take()):
            self._started = True
            self._events += [
                CallStarted(self._num_calls, scanner.name),
                CallArguments(self._num_calls, arguments),
            ]
            self._num_calls += 1
            self._space = ""
        elif self._started:
            self._events.append(CallArguments(self._num_calls - 1, scanner.take()))


class HermesParser(_Parser):
    """``OutputParser`` of Hermes' and Qwen's way."""

    def __init__(self) -> None:
        super().__init__()
        self._open, self._close = MarkFinder([OPEN]), MarkFinder([CLOSE])

    def _first(self, text: str) -> str:
        before, mark, after = self._open.feed(text)
        self._content(before)
        if mark is not None:
            self._begin_call()
            self._mode = self._in_call
        return after

    def _in_call(self, text: str) -> str:
        rest = self._scan(text)
        if self._scanner.over:
            self._mode = self._after_call
        return rest

    def _after_call(self, text: str) -> str:
        """Read up to the closing mark. If no call was emitted, all of it is content."""
        before, mark, after = self._close.feed(text)
        if not self._started:
            self._scanner.raw += before
        if mark is not None:
            if not self._started:
                self._content(OPEN + self._scanner.raw + CLOSE)
            self._mode = self._first
        return after

    def _end(self) -> None:
        if self._mode == self._first:
            self._content(self._open.finish())
        elif not self._started:
            self._content(OPEN + self._scanner.raw + self._close.finish())
        self._emit_space()


class Llama3Parser(_Parser):
    """``OutputParser`` of Llama 3's way. An object is a call only if it names one of ``names``: the answer
    may be JSON itself."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._tag = MarkFinder([PYTHON_TAG])
        self._tagged = ""

    def _first(self, text: str) -> str:
        """White space and the tag, then an object or content."""
        if not self._tag.held:
            bare = text.lstrip(SPACE + (";" if self._num_calls else ""))
            self._space += text[: len(text) - len(bare)]
            text = bare
        if text and not self._tagged and not self._num_calls and (self._tag.held or text[0] == "<"):
            return self._maybe_tag(text)
        if text:
            self._begin_call()
            self._mode = self._in_call if text[0] == "{" else self._plain
            if self._mode == self._plain and self._tagged:
                self._content(self._tagged)
        return text

    def _maybe_tag(self, text: str) -> str:
        before, mark, after = self._tag.feed(text)
        if mark is not None and not before:
            self._tagged = PYTHON_TAG
            return after
        if before or mark:
            self._mode = self._plain
            return before + (mark or "") + after + self._tag.finish()
        return ""

    def _in_call(self, text: str) -> str:
        rest = self._scan(text)
        if self._scanner.stage == "broken" and not self._started:
            self._content(self._tagged + self._scanner.raw)
            self._mode = self._plain
        elif self._scanner.over:
            self._mode = self._first
        return rest

    def _plain(self, text: str) -> str:
        self._content(text)
        return ""

    def _end(self) -> None:
        held = self._tag.finish()
        if self._mode == self._first:
            self._content(held)
        elif self._mode == self._in_call and not self._started:
            self._content(self._tagged + self._scanner.raw)
        self._emit_space()


class MistralParser(_Parser):
    """``OutputParser`` of Mistral's ways, the older and the newer."""

    def __init__(self) -> None:
        super().__init__()
        self._open, self._args = MarkFinder([TOOL_CALLS]), MarkFinder([ARGS, "{"])
        self._name = ""
        self._in_array = False

    def _first(self, text: str) -> str:
        before, mark, after = self._open.feed(text)
        self._content(before)
        if mark is not None:
            self._mode = self._after_mark
        return after

    def _after_mark(self, text: str) -> str:
        bare = text.lstrip(SPACE)
        if bare:
            self._begin_call()
            self._name, self._in_array = "", bare[0] == "["
            self._mode = self._between if self._in_array else self._naming
            return bare[1:] if self._in_array else bare
        return bare

    def _between(self, text: str) -> str:
        """Calls of an array."""
        bare = text.lstrip(SPACE + ",")
        if not bare:
            return ""
        if bare[0] == "]":
            self._mode = self._first
            return bare[1:]
        self._begin_call()
        self._mode = self._in_call
        return bare

    def _in_call(self, text: str) -> str:
        rest = self._scan(text)
        if self._scanner.over:
            if self._scanner.stage == "broken" and not self._started:
                self._content(self._broken_text())
                self._mode = self._first
            else:
                self._mode = self._between if self._in_array else self._first
        return rest

    def _naming(self, text: str) -> str:
        """Read a name, up to its arguments, which are scanned as in the older way."""
        before, mark, after = self._args.feed(text)
        self._name += before
        if mark is not None:
            self._scanner, self._started = CallScanner.of_arguments(self._name.strip()), False
            self._mode = self._in_arguments
            return "{" + after if mark == "{" else after
        return after

    def _in_arguments(self, text: str) -> str:
        rest = self._scan(text)
        if self._scanner.over:
            if not self._started:
                self._content(TOOL_CALLS + self._name + ARGS + self._scanner.raw)
            self._mode = self._first
        return rest

    def _broken_text(self) -> str:
        return (TOOL_CALLS + "[" if not self._num_calls else "") + self._scanner.raw

    def _end(self) -> None:
        if self._mode == self._first:
            self._content(self._open.finish())
        elif self._mode == self._naming:
            self._content(TOOL_CALLS + self._name + self._args.finish())
        elif self._mode == self._in_call and not self._started:
            self._content(self._broken_text())
        elif self._mode == self._after_mark:
            self._content(TOOL_CALLS)
        self._emit_space()


def tool_parser(style: ToolStyle, names: Collection[str]) -> OutputParser:
    """A new one; ``names``: the tools there are."""
    match style:
        case "hermes":
            return HermesParser()
        case "llama3":
            return Llama3Parser(names)
        case "mistral":
            return MistralParser()
