"""Reports to the coordinator that both worker roles make alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ..messages.messages import Adapter, BlockEvents, Load, PeerId


class CacheEvents(Protocol):
    """The engine's: what a cache has gained and lost."""

    def take(self) -> tuple[list[bytes], list[bytes]]: ...
    def close(self) -> None: ...


class PrefixCache(Protocol):
    """A block manager, as far as its cache's contents go."""

    def watch(self) -> CacheEvents: ...
    def cached_hashes(self) -> list[bytes]: ...


class CacheReporter:
    """Numbers a worker's reports about its prefix cache and the answers that it keeps."""

    def __init__(
        self, cache: PrefixCache, answers: Callable[[bool], tuple[bytes, bytes]] = lambda _: (b"", b"")
    ) -> None:
        """``answers``: returns the columns of BlockEvents about them: their changes, or with True all."""
        self._cache, self._events, self._answers = cache, cache.watch(), answers
        self.num_reports = 0

    def report(
        self, worker: PeerId, everything: bool, adapters: tuple[Adapter, ...] | None = None
    ) -> BlockEvents | None:
        """Return the blocks that the cache gained and lost since the last report; with ``everything``, all it
        has. ``adapters``: all that are ready, if others than before. None: no change."""
        stored, removed = self._events.take()
        if everything:
            stored, removed = self._cache.cached_hashes(), []
        kept, dropped = self._answers(everything)
        if not (stored or removed or kept or dropped or everything) and adapters is None:
            return None
        self.num_reports += 1
        worker_id, incarnation = worker
        return BlockEvents(
            worker_id=worker_id,
            incarnation=incarnation,
            number=self.num_reports,
            reset=everything,
            stored=b"".join(stored),
            removed=b"".join(removed),
            answers_kept=kept,
            answers_dropped=dropped,
            adapters=adapters,
        )

    def close(self) -> None:
        """Stop watching the cache."""
        self._events.close()


class Telemetry(Protocol):
    """Readings of a worker's device or process."""

    @property
    def gauges(self) -> Mapping[str, float]: ...
    @property
    def counters(self) -> Mapping[str, float]: ...


def with_telemetry(load: Load, *sources: Telemetry) -> Load:
    """Adds the readings of all sources to the heartbeat."""
    for source in sources:
        load.counters.update(source.counters)
        load.gauges.update(source.gauges)
    return load
