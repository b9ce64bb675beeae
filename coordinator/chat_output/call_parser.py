"""Finds tool calls in the text of an answer, as one of ``FORMATS`` writes them. Text that begins like a call
but is not one is content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .call_formats import CallFormat
from .call_readers import BaseReader, NamedReader, PythonReader
from .call_scanner import SPACE, CallScanner
from .events import CallArguments, CallStarted, Content, Event, joined
from .markers import MarkFinder
from .parameters_reader import ParametersReader

JUNK = SPACE + "}`"
"""What models leave between a call and its closing mark."""


class CallParser:
    """``OutputParser``. Reads in modes: each takes a piece of the text and returns the rest."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Any]) -> None:
        """``tools``: the parameters' schema of each that may be called, by name."""
        self._form, self._tools = form, tools
        self._bare = "" if form.opens else "[" if form.listed else "{"  # begins a call without a mark
        outer = (*form.openers, form.closes, *form.section)
        self._finder = MarkFinder([mark for mark in outer if mark])
        self._events: list[Event] = []
        self._num_calls = 0
        self._space = ""  # content only if content follows
        self._prefix = ""  # what stands before the text that a call's reader takes
        self._reader: BaseReader | CallScanner = CallScanner()
        self._started = False  # the client was sent the begin of the reader's call
        self._listed = False  # the reader's call is one of a list
        self._unopened = False  # an opening mark was content, so its closing mark is content too
        self._tail = ""  # what follows a call
        self._may_be_bare = bool(self._bare)
        self._mode: Callable[[str], str] = self._outside

    def feed(self, text: str) -> list[Event]:
        while text:
            text = self._mode(text)
        return self._taken()

    def finish(self) -> list[Event]:
        if self._mode == self._in_call:
            self._reader.finish()
            self._emit_arguments()
            if not self._started:
                self._content(self._prefix + self._reader.raw)
        elif self._mode == self._after:
            self._end_tail(self._tail + self._finder.finish())
        elif self._mode == self._outside:
            self._content(self._finder.finish())
        elif self._prefix.strip(SPACE + ","):
            self._content(self._prefix)
        if self._space and not self._num_calls:
            self._events.append(Content(self._space))
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _content(self, text: str) -> None:
        """White space around calls belongs to no content: it waits for what follows."""
        self._may_be_bare = self._may_be_bare and not text.strip(SPACE)
        text = self._space + text
        content = text.rstrip(SPACE)
        self._space = text[len(content) :]
        self._events.append(Content(content))

    def _outside(self, text: str) -> str:
        """Read up to a mark or, at the beginning of an answer that needs none, up to a call."""
        if self._may_be_bare and not self._finder.held:
            bare = text.lstrip(SPACE + (";" if self._num_calls else ""))
            self._space += text[: len(text) - len(bare)]
            if bare[:1] == self._bare:
                self._prefix, self._mode = "", self._opening
                return bare
            if not bare:
                return ""
            text = bare
        before, mark, after = self._finder.feed(text)
        if before:
            self._content(before)
        return after if mark is None else self._marked(mark, after)

    def _marked(self, mark: str, after: str) -> str:
        self._mode = self._outside
        if mark in self._form.openers:
            self._prefix, self._mode = mark, self._opening
            if self._form.call.strip().startswith(mark):  # it is part of the call
                self._prefix, after = "", mark + after
        elif mark == self._form.section[0]:
            self._space += mark
        elif self._unopened or not self._num_calls:
            self._content(mark)
            self._unopened = False
        return after

    def _opening(self, text: str) -> str:
        """Read from a mark to the begin of a call or of a list."""
        bare = text.lstrip(SPACE)
        self._prefix += text[: len(text) - len(bare)]
        self._listed = bare[:1] == "["
        if self._listed:
            self._prefix, self._mode = self._prefix + "[", self._between
            return bare[1:]
        return self._begin_call(bare) if bare else ""

    def _between(self, text: str) -> str:
        """Read from one call of a list to the next one, or to the list's end."""
        bare = text.lstrip(SPACE + ",")
        self._prefix += text[: len(text) - len(bare)]
        if bare[:1] != "]":
            return self._begin_call(bare) if bare else ""
        self._mode = self._after
        if self._prefix.strip(SPACE + ","):
            self._unopened = True
            self._content(self._prefix + "]")
            self._mode = self._outside
        return bare[1:]

    def _begin_call(self, text: str) -> str:
        self._started, self._mode = False, self._in_call
        match self._form.body:
            case "python":
                self._reader = PythonReader(self._tools)
            case "parameters":
                self._reader = ParametersReader(self._form, self._tools)
            case "named" if text[0] != "{" and not self._listed:
                self._reader = NamedReader(self._form)
            case _:
                self._reader = CallScanner(self._tools if self._bare else None)
        return text

    def _in_call(self, text: str) -> str:
        """Read up to the end of the call."""
        reader, at = self._reader, 0
        while at < len(text) and not reader.over:
            reader.feed(text[at])
            at += 1
        self._emit_arguments()
        if not reader.over:
            return ""
        if not reader.broken:
            self._mode = self._between if self._listed else self._after
            return text[at:]
        taken, unread = reader.raw[: -reader.num_unread], reader.raw[-reader.num_unread :]
        self._mode = self._after
        if not self._started:
            self._unopened, self._mode = True, self._outside
            self._content(self._prefix + taken)
        return unread + text[at:]

    def _emit_arguments(self) -> None:
        reader = self._reader
        text = reader.take() if reader.name is not None else ""
        if text and not self._started:
            self._events.append(CallStarted(self._num_calls, reader.name or "", reader.id))
            self._started, self._unopened = True, False
            self._num_calls += 1
            self._prefix = self._space = ""
        if text:
            self._events.append(CallArguments(self._num_calls - 1, text))

    def _after(self, text: str) -> str:
        """Read up to the mark that closes a call. Without it, what follows is content."""
        if self._bare:
            self._mode, self._may_be_bare = self._outside, True
            return text
        before, mark, after = self._finder.feed(text)
        self._tail += before
        if mark is not None:
            self._end_tail(self._tail)
            return self._marked(mark, after)
        if self._tail.strip(JUNK):
            self._end_tail(self._tail)
            self._mode = self._outside
        return after

    def _end_tail(self, tail: str) -> None:
        self._tail = ""
        if tail.strip(JUNK):
            self._content(tail)
