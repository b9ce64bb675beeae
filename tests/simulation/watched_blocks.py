"""A block manager that is looked at: whatever it does is compared with what really happens to the memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from splitserve.engine.cache.block_manager import BlockManager

if TYPE_CHECKING:
    from simulation.targets import BookTarget
    from simulation.worker_process import WorkerProcess


class WatchedBlocks(BlockManager):
    """Every change is checked when it happens; ``audit`` checks everything at once."""

    def __init__(self, num_blocks: int, process: WorkerProcess) -> None:
        super().__init__(num_blocks)
        self._process = process
        self.times_given = [0] * num_blocks
        self.targets: list[BookTarget] = []
        self._in_flight: dict[int, set[int]] = {}  # by step, the blocks that it reads or writes

    def allocate(self, count: int) -> list[int] | None:
        blocks = super().allocate(count)
        for block in blocks or ():
            self.times_given[block] += 1
        given = blocks or ()
        for used in self._in_flight.values():
            if not used.isdisjoint(given):
                self._violated(f"block {min(used.intersection(given))} is given out while a step uses it")
        for writer, writing in self._process.writers.items():
            if not writing.keys().isdisjoint(given):
                self._violated(
                    f"block {min(writing.keys() & set(given))} is given out while {writer.name} is "
                    "about to write it"
                )
        return blocks

    def commit(self, block: int, block_hash: bytes, parent: bytes | None) -> None:
        """A hash has the same content wherever and whenever it is stored."""
        super().commit(block, block_hash, parent)
        self._check_content(block, block_hash)

    def commit_all(self, blocks: Sequence[int], hashes: Sequence[bytes], parent: bytes | None) -> None:
        super().commit_all(blocks, hashes, parent)
        for block, block_hash in zip(blocks, hashes, strict=True):
            self._check_content(block, block_hash)

    def _check_content(self, block: int, block_hash: bytes) -> None:
        content = self._process.memory.checksum(block)
        if self._process.world.contents.setdefault(block_hash, content) != content:
            self._violated(f"block {block} is stored with other content than its hash stands for")

    def begin_put(self, blocks: Iterable[int]) -> None:
        """These are sent: they must be held."""
        for block in blocks:
            if not self._references[block]:
                self._violated(f"block {block} is sent, but nothing here holds it")

    def begin_step(self, step: object, blocks: set[int], written: Iterable[int]) -> None:
        """A step is going to run: what it writes is one sequence's alone, and every block is somewhere."""
        self._in_flight[id(step)] = blocks
        if self.num_blocks - self._references.count(0) != self.num_used:
            self._violated("blocks are not conserved")
        expected = {block for target in self.targets for block in target.expected_blocks()}
        for block in blocks:
            if not self._references[block]:
                self._violated(f"block {block} is used by a step, and nothing here holds it")
        for block in written:
            if block in expected:
                self._violated(f"block {block} is written by a step while a parcel may be put into it")
            if self._references[block] != 1:
                self._violated(f"block {block} is written with {self._references[block]} references")
            if self._hash[block] is not None:
                self._violated(f"block {block} is written though others may find it by its hash")

    def are_cached(self, blocks: Sequence[int]) -> bool:
        """Whether there are such blocks, and others may find them by their hashes."""
        return bool(blocks) and None not in [self._hash[block] for block in blocks]

    def end_step(self, step: object) -> None:
        """It reads and writes no more."""
        del self._in_flight[id(step)]

    def audit(self, owners: Iterable[Sequence[int]]) -> None:
        """Each block's references are those of its owners, it is in exactly one state, and what is stored is
        what its hash stands for."""
        references = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                references[block] += 1
        if references != self._references:
            wrong = next(b for b in range(self.num_blocks) if references[b] != self._references[b])
            self._violated(
                f"block {wrong} is referenced {self._references[wrong]} times, and has "
                f"{references[wrong]} owners"
            )
        free, idle, used = (
            set(self._free),
            set(self._idle),
            {b for b in range(self.num_blocks) if self._references[b]},
        )
        if (
            len(free) + len(idle) + len(used) != self.num_blocks
            or len(free | idle | used) != self.num_blocks
            or len(free) != self.num_free
        ):
            self._violated("blocks are not conserved")
        contents, memory = self._process.world.contents, self._process.memory
        for block_hash, block in self._block_of.items():
            if memory.checksum(block) != contents[block_hash]:
                self._violated(f"stored block {block} has been overwritten")

    def spill(self) -> None:
        """Empties the prefix cache."""
        for block in self._idle:
            self._forget(block)
            self._free.append(block)
        self._idle.clear()

    def _violated(self, what: str) -> None:
        self._process.world.violated(f"{self._process.name}: {what}")
