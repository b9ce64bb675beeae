"""Finds marks such as ``<tool_call>``, and stop strings, in a growing text."""

from __future__ import annotations

from collections.abc import Sequence


class MarkFinder:
    """Holds back what may yet become one of ``marks``."""

    __slots__ = ("_firsts", "_longest", "_marks", "held")

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._firsts = {mark[0] for mark in marks}
        self._longest = max(map(len, marks))
        self.held = ""  # what may yet become a mark

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """(text before the first mark, the mark, text after it); without a mark: (what is certain to be none,
        None, nothing)."""
        if not self.held and self._firsts.isdisjoint(text):
            return text, None, ""
        text = self.held + text
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)  # of two that begin there the shorter one
            self.held = ""
            return text[:at], mark, text[at + len(mark) :]
        keep = self._hold_from(text)
        self.held = text[keep:]
        return text[:keep], None, ""

    def finish(self) -> str:
        """What was held back."""
        text, self.held = self.held, ""
        return text

    def _hold_from(self, text: str) -> int:
        """Return the index of the longest tail with which a mark may begin."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(mark.startswith(text[at:]) for mark in self._marks):
                return at
        return len(text)


class StopStrings:
    """Cuts a growing text before the first stop string, or behind it; text that may yet become one is held
    back."""

    __slots__ = ("_finder", "_included", "matched")

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """``included``: the stop string is shown."""
        self._finder, self._included = MarkFinder(stops), included
        self.matched = ""  # the stop string that has cut the text

    def feed(self, text: str) -> str:
        """Return the text that may be shown now. Sets ``matched`` once a stop string is complete."""
        if self.matched:
            return ""
        shown, stop, _ = self._finder.feed(text)
        self.matched = stop or ""
        return shown + self.matched if self._included else shown

    def finish(self) -> str:
        """Return the text that was held back, once no text follows."""
        return self._finder.finish()
