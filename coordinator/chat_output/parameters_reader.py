"""Reads a call whose arguments stand between marks, one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .argument_types import kinds_of, property_of, quoted, typed
from .call_formats import CallFormat
from .call_readers import MAX_HEADER_CHARS, NAME, BaseReader
from .call_scanner import SPACE
from .markers import MarkFinder


class ParametersReader(BaseReader):
    """A name, and each parameter between marks: text that is typed by the tool's schema."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Any]) -> None:
        super().__init__()
        before, _, after = form.call.partition("$name")
        after, _, end = after.partition("$parameters")
        self._before, self._after = before.strip(), after.strip()
        opens, _, rest = form.parameter.partition("$key")
        middle, _, closes = rest.partition("$value")
        self._opens, self._closes = opens.strip(), closes.strip()
        self._middle = re.sub(r"\$string", " ", middle).split()
        self._declares_kind = "$string" in middle
        self._call_opens = form.opens
        self._own_line = middle.endswith("\n")  # the value stands on lines of its own
        self._ends = [end.strip() or form.closes, form.closes]
        self._tools, self._parameters = tools, None
        self._mode = self._in_header if self._after else self._in_bare_header
        self._text = ""  # of the present part
        self._key, self._wanted = "", list[str]()
        self._value, self._kinds = list[str](), frozenset[str]()
        self._finder = self._new_finder()
        self._begun = False  # a parameter was given

    def feed(self, char: str) -> None:
        self._raw.append(char)
        self._mode(char)

    def take(self) -> str:
        self._pass_on()
        return super().take()

    def finish(self) -> None:
        if self._mode == self._after_value:
            self._end_value()
        if self._mode in (self._between, self._after_value) and self.name is not None:
            self._end()

    def _in_header(self, char: str) -> None:
        self._text += char
        if self._text.endswith(self._after):
            name = self._text.strip().removesuffix(self._after)
            if not name.startswith(self._before):
                self._break()
            else:
                self._has_name(name.removeprefix(self._before))
        elif len(self._text) > MAX_HEADER_CHARS or self._strays(self._text.lstrip(SPACE), self._before):
            self._break()

    def _in_bare_header(self, char: str) -> None:
        """Read a name that the first mark ends."""
        self._text += char
        for mark in (self._opens, *self._ends):
            if self._text.endswith(mark):
                self._has_name(self._text.removesuffix(mark))
                if not self.broken:
                    self._at(mark)
                return
        if self._text.endswith(self._call_opens):
            self._break(len(self._call_opens))
        elif len(self._text) > MAX_HEADER_CHARS:
            self._break()

    def _has_name(self, name: str) -> None:
        if re.fullmatch(NAME, name := name.strip()) is None:
            self._break()
        else:
            self.name, self._text, self._mode = name, "", self._between
            self._parameters = self._tools.get(name)

    def _between(self, char: str) -> None:
        """Read white space, up to the next parameter or the end."""
        self._text = (self._text + char).lstrip(SPACE)
        if self._text in (self._opens, *self._ends):
            self._at(self._text)
        elif all(self._strays(self._text, mark) for mark in (self._opens, *self._ends)):
            self._break()

    def _at(self, mark: str) -> None:
        self._text = ""
        if mark == self._opens:
            self._mode, self._wanted = self._in_key, list(self._middle)
        else:
            self._end()

    def _in_key(self, char: str) -> None:
        """Read the key and all marks before the value."""
        self._text += char
        if self._text.endswith(self._wanted[0]):
            text = self._text.removesuffix(self._wanted.pop(0)).strip()
            if len(self._wanted) == len(self._middle) - 1:
                self._key = text
            self._text = ""
            if not self._wanted:
                self._begin_value(is_text=text == "true" if self._declares_kind else None)
        elif len(self._text) > MAX_HEADER_CHARS:
            self._break()

    def _begin_value(self, is_text: bool | None) -> None:
        """``is_text``: what the model declares it to be; None: the schema alone decides."""
        self._kinds = kinds_of(property_of(self._parameters, self._key), self._parameters)
        if is_text and (not self._kinds or "string" in self._kinds):
            self._kinds = frozenset(["string"])
        self._given.append(f"{', ' if self._begun else '{'}{quoted(self._key)}: ")
        self._begun, self._mode = True, self._first_of_value
        self._finder = self._new_finder()
        if self._streams:
            self._given.append('"')

    @property
    def _streams(self) -> bool:
        """The value is text, so that it is passed on as it comes."""
        return self._kinds == {"string"}

    def _first_of_value(self, char: str) -> None:
        self._mode = self._in_value
        if char != "\n" or not self._own_line:
            self._in_value(char)

    def _in_value(self, char: str) -> None:
        if not self._finder.held and char != "\n" and char != self._closes[0]:
            self._value.append(char)
            return
        before, mark, _ = self._finder.feed(char)
        self._value.append(before)
        if mark is not None:
            self._text, self._mode = mark, self._after_value

    def _after_value(self, char: str) -> None:
        """Read on until the closing mark turns out to be one, or to be part of the value."""
        self._text += char
        rest = self._text.lstrip("\n").removeprefix(self._closes).lstrip(SPACE)
        if rest in (self._opens, *self._ends):
            self._end_value()
            self._at(rest)
        elif len(self._text) > MAX_HEADER_CHARS or all(
            self._strays(rest, mark) for mark in (self._opens, *self._ends)
        ):
            text, self._text = self._text, ""
            at = text.index(self._closes) + len(self._closes)
            self._value.append(text[:at])
            self._mode = self._in_value
            for each in text[at:]:
                self._mode(each)

    def _pass_on(self) -> None:
        if self._streams and self._value:
            self._given.append(quoted("".join(self._value))[1:-1])
            self._value.clear()

    def _end_value(self) -> None:
        self._pass_on()
        self._given.append('"' if self._streams else typed("".join(self._value), self._kinds))
        self._value.clear()

    def _end(self) -> None:
        self._given.append("}" if self._begun else "{}")
        self.over = True

    def _new_finder(self) -> MarkFinder:
        return MarkFinder([f"\n{self._closes}", self._closes] if self._own_line else [self._closes])

    @staticmethod
    def _strays(text: str, mark: str) -> bool:
        """Whether the text can become neither the mark nor more than it."""
        return not mark.startswith(text) and not text.startswith(mark)
