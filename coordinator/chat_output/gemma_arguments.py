"""Reads arguments as Gemma 4 writes them, and gives them as JSON while they grow."""

from __future__ import annotations

from .argument_types import quoted, typed
from .call_scanner import MAX_NAME_CHARS, SPACE
from .markers import MarkFinder

CLOSING = {"{": "}", "[": "]"}
ANY: frozenset[str] = frozenset()
"""No kinds of values: a bare one is typed by its text alone."""


class GemmaArguments:
    """``{key:value,key:[value,...]}``: keys are bare, and a text stands as it is between two ``quote`` marks.

    JSON's strings are read, too, as keys and as values. A bare value that is not JSON is text. ``over``: the
    object is complete, or ``broken``; then the last ``num_unread`` characters are to be read anew.
    """

    over = broken = False
    num_unread = 1

    def __init__(self, quote: str) -> None:
        self._given: list[str] = []
        self._quote, self._finder = quote, MarkFinder([quote])
        self._mode = self._at_value
        self._closing: list[str] = []  # of the brackets that are open
        self._has_items = False  # the innermost bracket
        self._text: list[str] = []  # of the present key or value
        self._is_key = self._escaped = False
        self._num_key_chars = 0

    def feed(self, char: str) -> None:
        """Take the next character; none after it is ``over``."""
        self._mode(char)

    def take(self) -> str:
        """Return the JSON text that has come since the last call."""
        if self._mode == self._in_text and not self._is_key:
            self._give_text()
        text = "".join(self._given)
        self._given.clear()
        return text

    def _at_item(self, char: str) -> None:
        """Read up to a key or element, or to the bracket's end."""
        if char in SPACE:
            return
        if char == self._closing[-1]:
            self._close()
        elif self._closing[-1] == "}":
            self._num_key_chars = 1
            self._begin(char, is_key=True)
        else:
            self._give_comma()
            self._at_value(char)

    def _at_value(self, char: str) -> None:
        if char in SPACE:
            return
        if char in CLOSING:
            self._given.append(char)
            self._closing.append(CLOSING[char])
            self._has_items, self._mode = False, self._at_item
        else:
            self._begin(char, is_key=False)

    def _begin(self, char: str, *, is_key: bool) -> None:
        self._is_key = is_key
        match char:
            case '"':
                self._mode = self._in_json
            case "<":
                self._mode = self._in_mark
            case "," | ":" | "{" | "}" | "[" | "]":
                self._break()
                return
            case _:
                self._mode = self._in_bare_key if is_key else self._in_bare_value
        self._text.append(char)

    def _in_mark(self, char: str) -> None:
        """Read the mark before a text."""
        self._text.append(char)
        begun = "".join(self._text)
        if begun == self._quote:
            self._text.clear()
            self._mode = self._in_text
            if not self._is_key:
                self._given.append('"')
        elif not self._quote.startswith(begun):
            self._break(len(begun))

    def _in_text(self, char: str) -> None:
        """Read up to the mark after a text."""
        if not self._finder.held and char != self._quote[0]:
            self._text.append(char)
            self._check_key()
            return
        before, mark, _ = self._finder.feed(char)
        self._text.append(before)
        if mark is None:
            return
        if self._is_key:
            self._end_key(quoted("".join(self._text)))
        else:
            self._give_text()
            self._end_value('"')

    def _in_json(self, char: str) -> None:
        """Read a string as JSON has it."""
        self._text.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            text = typed("".join(self._text), ANY)
            if self._is_key:
                self._end_key(text)
            else:
                self._end_value(text)
            return
        self._check_key()

    def _in_bare_key(self, char: str) -> None:
        if char == ":":
            self._end_key(quoted("".join(self._text).rstrip(SPACE)))
            self._mode = self._at_value
        elif char in ",{}[]<":
            self._break()
        else:
            self._text.append(char)
            self._check_key()

    def _in_bare_value(self, char: str) -> None:
        if char in ",}]":
            self._end_value(typed("".join(self._text).rstrip(SPACE), ANY))
            self._after_value(char)
        elif char == "<":
            self._break()
        else:
            self._text.append(char)

    def _after_key(self, char: str) -> None:
        if char == ":":
            self._mode = self._at_value
        elif char not in SPACE:
            self._break()

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._mode = self._at_item
        elif char == self._closing[-1]:
            self._close()
        elif char not in SPACE:
            self._break()

    def _check_key(self) -> None:
        self._num_key_chars += 1
        if self._is_key and self._num_key_chars > MAX_NAME_CHARS:
            self._break()

    def _end_key(self, key: str) -> None:
        self._give_comma()
        self._given.append(f"{key}: ")
        self._text.clear()
        self._mode = self._after_key

    def _end_value(self, rest: str) -> None:
        self._given.append(rest)
        self._text.clear()
        self._mode = self._after_value

    def _close(self) -> None:
        self._given.append(self._closing.pop())
        self._has_items, self._mode = True, self._after_value
        self.over = not self._closing

    def _give_comma(self) -> None:
        self._given.append(", " if self._has_items else "")
        self._has_items = True

    def _give_text(self) -> None:
        self._given.append(quoted("".join(self._text))[1:-1])
        self._text.clear()

    def _break(self, num_unread: int = 1) -> None:
        self.over = self.broken = True
        self.num_unread = num_unread
