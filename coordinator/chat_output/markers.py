"""Finds marks such as ``<tool_call>`` in a growing text."""

from __future__ import annotations

from collections.abc import Sequence


class MarkFinder:
    """Holds back what may yet become one of ``marks``."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._firsts = {mark[0] for mark in marks}
        self._held = ""

    @property
    def held(self) -> str:
        """What may yet become a mark."""
        return self._held

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """(text before the first mark, the mark, text after it); without a mark: (what is certain to be none,
        None, nothing)."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None, ""
        text = self._held + text
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._held = ""
            return text[:at], mark, text[at + len(mark) :]
        keep = min(self._hold_from(text, mark) for mark in self._marks)
        self._held = text[keep:]
        return text[:keep], None, ""

    def finish(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _hold_from(text: str, mark: str) -> int:
        for length in range(min(len(mark) - 1, len(text)), 0, -1):
            if text.endswith(mark[:length]):
                return len(text) - length
        return len(text)
