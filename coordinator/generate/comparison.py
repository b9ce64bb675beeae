"""``Comparison``: whether two answers have the same tokens, found while both still grow. Pure."""

from __future__ import annotations

from array import array
from typing import Literal

Result = Literal["same", "different", "failed", "dropped"]
FIRST, COPY = 0, 1
CUT = "cut"
"""The end of an answer that was cancelled: its client has gone, or has enough."""


class Comparison:
    """Compares the first answer's tokens with its copy's. Kept are only those that one is ahead by."""

    def __init__(self) -> None:
        self.result: Result | None = None
        """None: not known yet."""
        self.position = 0
        """Number of tokens that are the same; of different answers the first token that differs, from 0."""
        self._ahead = array("i")  # behind the first ``_taken``: tokens of ``_leader`` that the other lacks
        self._taken, self._leader = 0, FIRST
        self._ends: list[str | None] = [None, None]

    def push(self, side: int, token_id: int) -> None:
        """Take the next token of one side."""
        if self.result is not None:
            return
        if self._leads(1 - side):
            if token_id != self._ahead[self._taken]:
                self.result = "different"
                return
            self.position, self._taken = self.position + 1, self._taken + 1
            if self._taken == len(self._ahead):
                del self._ahead[:]
                self._taken = 0
            self._look()
        elif self._ends[1 - side] is not None:
            self.result = "different"  # the other has ended here
        else:
            self._leader = side
            self._ahead.append(token_id)

    def end(self, side: int, reason: str) -> None:
        """Take the end of one side. ``reason``: its finish reason, or CUT for the first."""
        self._ends[side] = reason
        if self.result is None:
            self._look()

    def _leads(self, side: int) -> bool:
        return self._leader == side and self._taken < len(self._ahead)

    def _look(self) -> None:
        """Decide, if the ends allow it."""
        first, copy = self._ends
        if first == CUT and not self._leads(FIRST):
            self.result = "same" if self.position else "dropped"  # there was nothing to compare
        elif (first not in (None, CUT) and self._leads(COPY)) or (copy is not None and self._leads(FIRST)):
            self.result = "different"  # one is longer
        elif None not in self._ends and not self._leads(FIRST):
            self.result = "same" if first == copy else "different"
