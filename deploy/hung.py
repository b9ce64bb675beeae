"""Which running workers the coordinator has given up: those are hung, and only their end helps. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class HungWatch:
    """A worker that the coordinator knew, and has not known for ``patience_s`` while its process runs, is
    hung."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._last_known: dict[tuple[str, int], float] = {}

    def hung(self, known: Collection[str], running: Mapping[str, int], now: float) -> list[str]:
        """Return the workers to kill, each process once. ``known``: workers that the coordinator counts as
        alive; ``running``: process ids by worker."""
        processes = {(name, pid) for name, pid in running.items()}
        self._last_known = {process: at for process, at in self._last_known.items() if process in processes}
        for process in processes:
            if process[0] in known:
                self._last_known[process] = now
        given_up = [process for process, at in self._last_known.items() if now - at >= self._patience_s]
        for process in given_up:
            del self._last_known[process]
        return sorted(name for name, _ in given_up)
