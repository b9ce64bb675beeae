"""Answers of gpt-oss: messages of their own, each with a channel and perhaps a recipient.

<|channel|>analysis<|message|>...<|end|>                                        a thought
<|start|>assistant<|channel|>commentary to=functions.NAME ...<|message|>{...}<|call|>  a call
<|start|>assistant<|channel|>final<|message|>...<|return|>                      the answer
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .call_scanner import CallScanner
from .events import CallArguments, CallStarted, Content, Event, Reasoning, joined
from .markers import MarkFinder

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
NEXT_MESSAGE = "<|end|><|start|>assistant"
HEADER = re.compile(r"\s*+(?:(?!to=)\w++)?+(?:\s*+to=\S*+)?+\s*+(?:<\|constrain\|>\s*+)?+\w*+\s*+")
"""After the last channel mark; possessive, for a model may write white space without end."""
HARMONY_MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)


class HarmonyParser:
    """``OutputParser``. A thought of several messages is joined with newlines."""

    def __init__(self, names: Collection[str], prompt: str = "") -> None:
        """``names``: of the tools that may be called. ``prompt``: its end, which may have begun a message."""
        self._names = names
        self._finder = MarkFinder([START, CHANNEL, MESSAGE, *ENDS])
        self._events: list[Event] = []
        self._header, self._is_header = "", True
        self._channel = ""
        self._scanner: CallScanner | None = None
        self._num_calls = 0
        self._started = self._has_thought = False
        begun = prompt[prompt.rfind(START) :] if START in prompt else ""
        if not any(end in begun for end in ENDS):
            self.feed(begun)
            self._events.clear()
            self._has_thought = False

    def feed(self, text: str) -> list[Event]:
        while text:
            before, mark, text = self._finder.feed(text)
            self._take(before)
            if mark is not None:
                self._at(mark)
        return self._taken()

    def finish(self) -> list[Event]:
        self._take(self._finder.finish())
        if self._is_header and START not in self._header and CHANNEL not in self._header:
            self._events.append(Content(self._header))
        self._end()
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _at(self, mark: str) -> None:
        if self._is_header and mark == MESSAGE:
            self._begin()
        elif self._is_header and mark == CHANNEL:
            self._header += mark
        elif mark in ENDS or mark == START:
            self._end()
            self._header, self._is_header = mark if mark == START else "", True
        else:
            self._take(mark)

    def _begin(self) -> None:
        self._is_header, self._started = False, False
        found = re.search(r"<\|channel\|>\s*(\w+)", self._header)
        self._channel = found[1] if found else "final"
        recipient = re.search(r"to=functions\.([\w.-]+)", self._header)
        self._scanner = CallScanner.of_arguments(recipient[1]) if recipient and self._names else None
        self._header += MESSAGE

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._is_header:
            self._header += text
            if CHANNEL not in self._header and not _may_be_header(self._header):
                self._plain()
        elif self._scanner is not None:
            self._scan(text)
        elif self._channel == "analysis":
            if self._has_thought and not self._started:
                self._events.append(Reasoning("\n"))
            self._started = self._has_thought = True
            self._events.append(Reasoning(text))
        else:
            self._events.append(Content(text))

    def _plain(self) -> None:
        """The text is no header: the model has left it out."""
        text, self._header = self._header, ""
        self._is_header, self._channel, self._scanner = False, "final", None
        self._events.append(Content(text))

    def _scan(self, text: str) -> None:
        scanner = self._scanner
        assert scanner is not None, "a call's message has one"
        at = 0
        while at < len(text) and not scanner.over:
            scanner.feed(text[at])
            at += 1
        if arguments := scanner.take():
            self._call(arguments)
        rest = text[at:]
        if scanner.broken:
            rest = (scanner.raw[-1] if self._started else self._header + scanner.raw) + rest
        if rest := rest.lstrip():
            self._scanner, self._channel = None, "final"
            self._events.append(Content(rest))

    def _call(self, arguments: str) -> None:
        if not self._started and self._scanner is not None:
            self._events.append(CallStarted(self._num_calls, self._scanner.name or ""))
            self._started = True
            self._num_calls += 1
        self._events.append(CallArguments(self._num_calls - 1, arguments))

    def _end(self) -> None:
        """End the present message. One that never began shows a header that is more than one."""
        _, channel, header = self._header.rpartition(CHANNEL)
        if self._is_header and channel and not HEADER.fullmatch(header):
            self._events.append(Content(self._header))
        if self._scanner is not None and not self._started:
            self._call("{}")
        self._scanner = None


def _may_be_header(text: str) -> bool:
    """Whether the text may stand before a channel: a role and a recipient."""
    role = text.removeprefix(START).lstrip()
    rest = role.removeprefix("assistant").lstrip()
    return "assistant".startswith(role) or "to=".startswith(rest) or bool(re.fullmatch(r"to=\S*\s*", rest))
