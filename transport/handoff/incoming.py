"""The handoff of one prompt, as its receiver knows it: its blocks' arrival and verification. Pure.

WAITING    until there is room
GRANTED    blocks arrive; one that has arrived and whose checksum is known is checked
COMPLETE   Handoff has come: joined once every block is verified; corrupt ones are put again, once
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..messages.messages import Grant, Handoff, PeerId
from ..movers.interface import ONE_SIDED_MOVERS
from .protocol import Key, Verify


@dataclass(slots=True)
class Incoming:
    """``lease`` is 0 until granted. Positions count the prompt's blocks. Those below ``num_cached`` do not
    travel: they are cached here, or lie below ``num_behind``, behind the sliding window, and have no block.
    """

    key: Key
    peer: PeerId
    request_id: str
    epoch: int
    num_tokens: int
    hashes: list[bytes]
    offered_at: float  # when Offer last came
    num_behind: int = 0
    is_test: bool = False  # of its writer's mover: it joins nothing
    lease: int = 0
    mover: str = ""  # by which its writer puts
    grant: Grant | None = None
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    expires: float = 0.0
    handoff: Handoff | None = None
    handoff_at: float = 0.0
    retried: bool = False
    arrived: set[int] = field(default_factory=set)
    checksums: dict[int, int] = field(default_factory=dict)  # from the sender
    due: set[int] = field(default_factory=set)  # has arrived, has a checksum, and is not checked yet
    checking: set[int] = field(default_factory=set)
    right: set[int] = field(default_factory=set)
    wrong: set[int] = field(default_factory=set)

    @property
    def one_sided(self) -> bool:
        """Whether its writer writes this worker's memory by itself."""
        return self.mover in ONE_SIDED_MOVERS

    @property
    def held(self) -> list[int]:
        """The blocks that it holds here, in order."""
        return self.blocks[self.num_behind :]

    @property
    def num_travelling(self) -> int:
        return len(self.blocks) - self.num_cached

    @property
    def verifying(self) -> bool:
        """Whether the writer has done its part, and the lease waits for this worker's own check."""
        return self.handoff is not None and bool(self.checking)

    @property
    def verified(self) -> bool:
        return self.handoff is not None and len(self.right) == self.num_travelling

    def add_checksums(self, first: int, checksums: list[int]) -> None:
        """Take the sender's checksums of the positions from ``first`` on; ignored unless all of them travel.
        A one-sided writer sends them after the blocks."""
        positions, known = range(first, first + len(checksums)), self.checksums
        if positions.start < self.num_cached or positions.stop > len(self.blocks):
            return
        if self.right:  # some may have been put again with other content since they were checked
            self.right.difference_update(
                p
                for p, checksum in zip(positions, checksums, strict=True)
                if known.get(p, checksum) != checksum
            )
        known.update(zip(positions, checksums, strict=True))
        if self.one_sided:
            self.arrived.update(positions)
        self._note_due(positions)

    def arrive(self, positions: Iterable[int]) -> None:
        """Note that these blocks have been written."""
        self.arrived.update(positions)
        self._note_due(positions)

    def checks(self) -> Verify | None:
        """Return a check of the due blocks, which is under way from now on."""
        if not self.due:
            return None
        due = sorted(self.due)
        self.due.clear()
        self.checking.update(due)
        return Verify(self.lease, due, [self.blocks[p] for p in due], [self.checksums[p] for p in due])

    def checked(self, positions: list[int], wrong: list[int]) -> None:
        """Take the result of (a part of) a check."""
        self.due.difference_update(positions)
        self.checking.difference_update(positions)
        self.right.update(positions)
        self.right.difference_update(wrong)
        self.wrong.update(wrong)

    def expect_again(self) -> list[int]:
        """Return the corrupt positions, which count as not arrived from now on."""
        wrong = sorted(self.wrong)
        self.arrived -= self.wrong
        self.wrong.clear()
        self.retried, self.handoff = True, None
        return wrong

    def _note_due(self, positions: Iterable[int]) -> None:
        due = self.arrived.intersection(positions).intersection(self.checksums)
        self.due |= due - self.right - self.checking - self.wrong
