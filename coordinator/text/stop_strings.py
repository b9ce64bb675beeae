"""Stop strings in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence

from ..chat_output.markers import MarkFinder


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
