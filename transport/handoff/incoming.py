"""One prompt on its way in: what has arrived of it, what is verified, and what is still to be checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..messages.messages import Grant, Handoff, PeerId
from ..movers.interface import ONE_SIDED_MOVERS
from .protocol import Key, Verify


@dataclass(slots=True)
class Incoming:
    """``lease`` is 0 until granted. Positions count the prompt's blocks; those below ``num_cached`` do not
    travel: they are cached here, or they are below ``num_behind``, behind the sliding window, and have no
    block."""

    key: Key
    peer: PeerId
    request_id: str
    epoch: int
    num_tokens: int
    hashes: list[bytes]
    heard: float
    num_behind: int = 0
    lease: int = 0
    mover: str = ""  # that its writer has for it
    grant: Grant | None = None
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    expires: float = 0.0
    handoff: Handoff | None = None
    handoff_at: float = 0.0
    retried: bool = False
    arrived: set[int] = field(default_factory=set)
    checksums: dict[int, int] = field(default_factory=dict)  # as the sender told them
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
        """The writer has done its part: what the lease waits for is our own check."""
        return self.handoff is not None and bool(self.checking)

    @property
    def verified(self) -> bool:
        return self.handoff is not None and len(self.right) == self.num_travelling

    def told(self, first: int, checksums: list[int]) -> bool:
        """Books what the sender says of the positions from ``first`` on. False: those are not positions that
        travel."""
        if first < self.num_cached or first + len(checksums) > len(self.blocks):
            return False
        positions, known = range(first, first + len(checksums)), self.checksums
        if self.right:  # some may have been put again with other content since they were checked
            self.right.difference_update(
                p
                for p, checksum in zip(positions, checksums, strict=True)
                if known.get(p, checksum) != checksum
            )
        known.update(zip(positions, checksums, strict=True))
        self._are_due(positions)
        return True

    def arrive(self, positions: Iterable[int]) -> None:
        """These blocks have been written."""
        self.arrived.update(positions)
        self._are_due(positions)

    def _are_due(self, positions: Iterable[int]) -> None:
        due = self.arrived.intersection(positions).intersection(self.checksums)
        self.due |= due - self.right - self.checking - self.wrong

    def checks(self) -> Verify | None:
        """What is due, from now on under way."""
        if not self.due:
            return None
        due = sorted(self.due)
        self.due.clear()
        self.checking.update(due)
        return Verify(self.lease, due, [self.blocks[p] for p in due], [self.checksums[p] for p in due])

    def checked(self, positions: list[int], wrong: list[int]) -> None:
        """Books the answer to (a part of) a Verify."""
        self.due.difference_update(positions)
        self.checking.difference_update(positions)
        self.right.update(positions)
        self.right.difference_update(wrong)
        self.wrong.update(wrong)

    def expect_again(self) -> list[int]:
        """The wrong positions, which are now taken as not arrived."""
        wrong = sorted(self.wrong)
        self.arrived -= self.wrong
        self.wrong.clear()
        self.retried, self.handoff = True, None
        return wrong
