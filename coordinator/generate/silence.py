"""What keeps a silent stream open: proxies and clients give up a connection on which nothing comes."""

from __future__ import annotations

from collections.abc import Iterable

HEADERS_AFTER_S = 2.0
"""Seconds after which a stream without text gets its headers at the latest."""
COMMENT_EVERY_S = 15.0
"""The longest silence of a stream in seconds; one that goes on never has a comment."""
COMMENT = b": waiting\n\n"


class Silence:
    """Decides when a stream needs headers or a comment. All times are monotonic seconds."""

    def __init__(self, arrival: float) -> None:
        self._arrival = self._since = arrival

    def headers_due(self, by: float) -> bool:
        """Whether the headers must be sent ``by`` then, text or not."""
        return by >= self._arrival + HEADERS_AFTER_S

    def comment_due(self, now: float, by: float, last_writes: Iterable[float]) -> bool:
        """Whether a comment must be sent ``by`` then: it is taken to be sent ``now``.

        ``last_writes``: of each choice, 0 where there was none; not looked at before a comment may be due.
        """
        if by < self._since + COMMENT_EVERY_S:
            return False
        self._since = max([self._since, *last_writes])
        if by < self._since + COMMENT_EVERY_S:
            return False
        self._since = now
        return True
