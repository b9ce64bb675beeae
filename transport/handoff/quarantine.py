"""Blocks of leases that ended without their writer's word: nobody gets them before it has stopped writing for
certain. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .handoff import Key, PeerId


@dataclass(slots=True)
class EndedLease:
    """A lease that ended without its writer's word."""

    key: Key
    writer: PeerId
    blocks: list[int]
    asked: float = -1e9  # when the writer was last asked to let go
    since: float = 0.0  # when it was first asked


class Quarantine:
    """Time alone ends nothing here: the writer's Release does, or its death, or that it was shut out."""

    def __init__(self) -> None:
        self.leases: dict[int, EndedLease] = {}

    @property
    def num_blocks(self) -> int:
        return sum(len(ended.blocks) for ended in self.leases.values())

    def of_writer(self, peer: PeerId) -> list[int]:
        """The leases that wait for this writer's word."""
        return [lease for lease, ended in self.leases.items() if ended.writer == peer]

    def to_ask(self, every_s: float, now: float) -> Iterator[tuple[int, EndedLease]]:
        """The leases whose writers are to be asked now."""
        for lease, ended in self.leases.items():
            if now - ended.asked >= every_s:
                ended.since = ended.since or now
                ended.asked = now
                yield lease, ended

    def silent_writers(self, silence_s: float, now: float) -> set[PeerId]:
        """Those that have not answered for so long."""
        return {e.writer for e in self.leases.values() if e.since and now - e.since >= silence_s}
