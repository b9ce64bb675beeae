"""How many of an answer's tokens are a thought: told as they come, since the parser of its text sees no tokens."""

from __future__ import annotations

from ..text.detokenizer import Detokenizer
from .reasoning import CLOSE, OPEN, SPACE


class ThoughtCounter:
    """A detokenizer around another one. ``num_tokens``: of the thought so far, its marks included."""

    def __init__(self, inner: Detokenizer, *, opened: bool) -> None:
        """``opened``: the prompt ends with the opening mark already; see ``ReasoningParser``."""
        self.num_tokens = 0
        self._inner = inner
        self._opened, self._over = opened, False
        self._num_seen = 0
        self._text = ""  # as much of it as may yet become a mark

    def step(self, token_id: int) -> str:
        """The inner one's text."""
        text = self._inner.step(token_id)
        if not self._over:
            self._count(text)
        return text

    def finish(self) -> str:
        """The inner one's."""
        return self._inner.finish()

    def _count(self, text: str) -> None:
        self._num_seen += 1
        self._text += text
        if not self._opened:
            bare = self._text.lstrip(SPACE)
            if not bare.startswith(OPEN):
                self._over = not OPEN.startswith(bare)
                return
            self._opened, self._text = True, bare.removeprefix(OPEN)
        self.num_tokens = self._num_seen
        self._over = CLOSE in self._text
        self._text = self._text[-len(CLOSE) :]
