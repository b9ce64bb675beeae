"""Readers of one call each, character by character; ``CallScanner`` reads the calls that are JSON objects."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from .argument_types import arguments_of_python
from .call_formats import CALL_ID, CallFormat
from .call_scanner import SPACE, CallScanner
from .gemma_arguments import GemmaArguments

MAX_HEADER_CHARS = 300
NAME = r"(?P<name>[\w.-]+?)"


class BaseReader(ABC):
    """Reads one call. ``over``: the call is complete, or ``broken``; then the last ``num_unread`` characters
    are to be read anew. A ``CallScanner`` has the same attributes and methods."""

    name: str | None = None
    id: str | None = None
    over = broken = False
    num_unread = 1

    def __init__(self) -> None:
        self._raw: list[str] = []  # lists: a long call is read in time that grows with its length alone
        self._given: list[str] = []

    @property
    def raw(self) -> str:
        """All that it was fed."""
        return "".join(self._raw)

    @abstractmethod
    def feed(self, char: str) -> None:
        """Take the next character; none after it is ``over``."""

    def take(self) -> str:
        """Return the JSON text of arguments that has come since the last call; nothing before the name is
        known."""
        text = "".join(self._given)
        self._given.clear()
        return text

    def finish(self) -> None:  # noqa: B027  most have nothing to do
        """No text follows."""

    def _break(self, num_unread: int = 1) -> None:
        self.over = self.broken = True
        self.num_unread = num_unread


class NamedReader(BaseReader):
    """A name, marks, and the arguments as a JSON object. Without arguments the closing mark ends the call."""

    def __init__(self, form: CallFormat) -> None:
        super().__init__()
        self._opens, self._closes, self._quote = form.opens, form.closes, form.quote
        self._header = _header_pattern(form.call.partition("$arguments")[0])
        self._has_id = "$index" in form.call
        self._text = ""  # before the arguments
        self._scanner: CallScanner | GemmaArguments | None = None

    def feed(self, char: str) -> None:
        self._raw.append(char)
        if self._scanner is not None:
            self._scanner.feed(char)
            self.over, self.broken = self._scanner.over, self._scanner.broken
            self.num_unread = self._scanner.num_unread
        elif char == "{":
            self._named(self._text)
            if not self.broken:
                named = CallScanner.of_arguments(self.name or "")
                self._scanner = GemmaArguments(self._quote) if self._quote else named
                self._scanner.feed(char)
        else:
            self._in_header(char)

    def take(self) -> str:
        return super().take() if self._scanner is None else self._scanner.take()

    def _in_header(self, char: str) -> None:
        self._text += char
        if self._closes and self._text.endswith(self._closes):
            self._named(self._text.removesuffix(self._closes))
            self._given.append("{}")
            self.over = True
        elif self._text.endswith(self._opens):
            self._break(len(self._opens))
        elif len(self._text) > MAX_HEADER_CHARS:
            self._break()

    def _named(self, header: str) -> None:
        if found := self._header.fullmatch(header.strip()):
            self.name, self.id = found["name"], found["id"] if "id" in found.groupdict() else None
            if self._has_id and (before := re.match(r"\S+?:\d+", header.strip())):
                self.id = before[0]
        else:
            self._break()


class PythonReader(BaseReader):
    """``name(key=value, ...)`` of one of ``names``; given whole at its end."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._depth, self._quote, self._escaped = 0, "", False

    def feed(self, char: str) -> None:
        self._raw.append(char)
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "([{":
            self._depth += 1
            if self._depth == 1 and (char != "(" or self.raw[:-1].strip() not in self._names):
                self._break()
        elif not self._depth:
            if not (char.isalnum() or char in "_.-" + SPACE):
                self._break()
        elif char in ")]}":
            self._depth -= 1
            if not self._depth:
                self._end()
        elif char in "'\"":
            self._quote = char

    def _end(self) -> None:
        name, _, rest = self.raw.partition("(")
        arguments = arguments_of_python(rest[:-1])
        if arguments is None:
            self._break()
        else:
            self._given.append(arguments)
            self.name, self.over = name.strip(), True


def _header_pattern(text: str) -> re.Pattern[str]:
    """Return what stands before the arguments: the name, and around it what the model may leave out."""
    pattern = ""
    for part in re.split(r"(\$[a-z_]+|\s+)", text):
        if part == "$name":
            pattern += NAME
        elif part == "$index":
            pattern += r"\d*"
        elif part == "$call_id":
            pattern += rf"(?:{re.escape(CALL_ID)}(?P<id>\w+))?"
        elif part.strip():
            pattern += "".join(
                f"(?:{re.escape(word)})?" for word in re.split(r"(?<=[>\]])|(?=<)", part) if word
            )
        elif part:
            pattern += r"\s*"
    return re.compile(pattern)
