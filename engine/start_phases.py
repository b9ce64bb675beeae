"""How long each phase of a start took, for one line of log."""

from __future__ import annotations

import time


class StartPhases:
    """``done(name)`` after each phase; the clock runs from construction."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def done(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now

    def __str__(self) -> str:
        """``3.1 s: fingerprint 0.4, weights 2.1, KV cache 0.2, warm-up 0.4``"""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{self._last - self._start:.1f} s: {parts}"
