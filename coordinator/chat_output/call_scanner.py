"""Reads ``{"name": ..., "arguments": {...}}`` as it is written, so that arguments can be passed on before
they are complete."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

SPACE = " \n\r\t"
PLAIN = frozenset(":,-+.0123456789eEtrufalsn" + SPACE)
"""What stands in JSON's values outside strings and brackets."""
MAX_NAME_CHARS = 300
ARGUMENTS = ("arguments", "parameters")
Stage = Literal["start", "key", "in key", "colon", "value", "in value", "after", "done", "broken"]


class CallScanner:
    """One JSON object, character by character. ``name`` is set once it is known; ``take`` gives arguments, as
    the model wrote them."""

    id: str | None = None
    num_unread = 1

    def __init__(self, names: Collection[str] | None = None) -> None:
        """``names``: an object that names none of these is no call."""
        self.name: str | None = None
        self._names = names
        self._bare = False  # it is the arguments alone
        self.stage: Stage = "start"
        self._raw: list[str] = []
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []
        self._has_arguments = False

    @classmethod
    def of_arguments(cls, name: str) -> CallScanner:
        """Return a scanner of a call whose name is known: only its arguments follow."""
        scanner = cls()
        scanner.name, scanner.stage, scanner._key, scanner._bare = name, "value", "arguments", True
        return scanner

    @property
    def over(self) -> bool:
        """The object is complete, or is none."""
        return self.stage in ("done", "broken")

    @property
    def broken(self) -> bool:
        """It is no such object, or it is one no longer: the last character does not belong to it."""
        return self.stage == "broken"

    @property
    def raw(self) -> str:
        """All that it was fed."""
        return "".join(self._raw)

    def take(self) -> str:
        """The arguments' text that has come since the last call; nothing before the name is known."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        if self.stage == "done" and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        return text

    def feed(self, char: str) -> None:
        """The next character; none after it is ``over``."""
        self._raw.append(char)
        match self.stage:
            case "in key":
                self._in_key(char)
            case "in value":
                self._in_value(char)
            case _ if char in SPACE:
                pass
            case "start" if char == "{":
                self.stage = "key"
            case "key" if char == '"':
                self._key, self.stage = char, "in key"
            case "key" | "after" if char == "}":
                self.stage = "done" if self.name is not None else "broken"
            case "after" if char == ",":
                self.stage = "key"
            case "colon" if char == ":":
                self.stage = "value"
            case "value" if char in '{["-0123456789tfn':
                self._value, self._depth, self._in_string, self._escaped = "", 0, False, False
                self._has_arguments |= self._key in ARGUMENTS
                self.stage = "in value"
                self._in_value(char)
            case _:
                self.stage = "broken"

    def _in_key(self, char: str) -> None:
        self._key += char
        if self._string_ends(char):
            self._key, self.stage = _decoded(self._key), "colon"
        elif len(self._key) > MAX_NAME_CHARS:
            self.stage = "broken"

    def _in_value(self, char: str) -> None:
        if self._in_string:
            self._keep(char)
            if self._string_ends(char):
                self._in_string = False
                self._ends_if_outside()
        elif char == '"':
            self._keep(char)
            self._in_string = True
        elif char in "{[":
            self._keep(char)
            self._depth += 1
        elif char in "}]" and self._depth:
            self._keep(char)
            self._depth -= 1
            self._ends_if_outside()
        elif not self._depth and char in "},":
            self._ends()
            self.stage = "key" if char == "," else "done" if self.name is not None else "broken"
        elif not self._depth and char in SPACE:
            self._ends()
        elif char in PLAIN:
            self._keep(char)
        else:
            self.stage = "broken"

    def finish(self) -> None:
        """No text follows: arguments stay as they are."""

    def _string_ends(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        else:
            return char == '"'
        return False

    def _keep(self, char: str) -> None:
        if self._key in ARGUMENTS:
            self._arguments.append(char)
        elif self._key == "name":
            self._value += char
            if len(self._value) > MAX_NAME_CHARS:
                self.stage = "broken"

    def _ends_if_outside(self) -> None:
        if not self._depth:
            self._ends()

    def _ends(self) -> None:
        self.stage = "done" if self._bare else "after"
        if self._key == "name":
            name = _decoded(self._value)
            known = name and (self._names is None or name in self._names)
            self.name, self.stage = (name, "after") if known else (None, "broken")


def _decoded(text: str) -> str:
    """A JSON string's value; empty if it is none, or none that can be sent on: half a surrogate pair."""
    try:
        value = json.loads(text, strict=False)
        return value if isinstance(value, str) and value.encode() else ""
    except ValueError:
        return ""
