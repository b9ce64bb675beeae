"""Stop strings in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a growing text before the first stop string, or behind it; text that may yet become one is held
    back."""

    __slots__ = ("_first", "_held", "_included", "_longest", "_prefixes", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """``included``: the stop string is shown."""
        self._stops, self._included = tuple(stops), included
        self._longest = max(map(len, stops))
        self._prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        self._first = {stop[0] for stop in stops}
        self._held = ""
        self.matched = ""  # the stop string that has cut the text

    def feed(self, text: str) -> str:
        """Return the text that may be shown now. Sets ``matched`` once a stop string is complete."""
        if self.matched:
            return ""
        text = self._held + text
        found = [(at, at + len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            start, end = min(found)
            self.matched = text[start:end]
            self._held = ""
            return text[: end if self._included else start]
        keep = self._hold_from(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return the text that was held back, once no text follows."""
        text, self._held = self._held, ""
        return text

    def _hold_from(self, text: str) -> int:
        """Return the index of the longest tail with which a stop string may begin."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first and text[at:] in self._prefixes:
                return at
        return len(text)
