"""What both worker roles tell the coordinator in the same words."""

from __future__ import annotations

from typing import Protocol

from .handoff import PeerId
from .messages import BlockEvents, TokenLogprobs


class PrefixCache(Protocol):
    """A block manager, as far as its cache's contents go."""

    def take_events(self) -> tuple[list[bytes], list[bytes]]: ...
    def cached_hashes(self) -> list[bytes]: ...


class LogprobsEntry(Protocol):
    """The engine's logprobs of one position."""

    @property
    def logprob(self) -> float: ...
    @property
    def top_ids(self) -> tuple[int, ...]: ...
    @property
    def top_logprobs(self) -> tuple[float, ...]: ...


def block_events(worker: PeerId, cache: PrefixCache, everything: bool) -> BlockEvents | None:
    """What the prefix cache gained and lost since the last report; with ``everything``, all it has. None: nothing to say."""
    stored, removed = cache.take_events()
    if everything:
        stored, removed = cache.cached_hashes(), []
    if not (stored or removed or everything):
        return None
    worker_id, incarnation = worker
    return BlockEvents(
        worker_id=worker_id, incarnation=incarnation, reset=everything, stored=b"".join(stored), removed=b"".join(removed)
    )


def logprobs_message(entry: LogprobsEntry) -> TokenLogprobs:
    """The engine's logprobs as they travel."""
    return TokenLogprobs(logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs)
