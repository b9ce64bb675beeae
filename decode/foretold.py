"""Decode steps whose outcome is known before they run, many at once: what lets virtual time jump. Pure.

Where no sequence can end but by its length, steps over the same rows differ in nothing but the positions. ``DecodeScheduler.foretell``
begins such steps; the first of them is running from then on, and after each ``pass_by`` the next one is, with the blocks that it
writes. A sequence that joins meanwhile waits for the running step to end, as it would for any; whatever else would change the batch
(a sequence is dropped, or moves) makes the running step an ordinary one first.
"""

from __future__ import annotations

from collections.abc import Callable

from ..engine.cache.block_manager import BlockManager
from .rows import DecodeRows, DecodeSequence

TOKEN_ID = 0
"""What foretold steps yield."""
Commit = Callable[[DecodeSequence, int], None]


class Foretold:
    """``num_steps`` steps, of which ``num_passed`` have run and the next one is running; only the last may end sequences."""

    def __init__(self, rows: DecodeRows, blocks: BlockManager, commit: Commit | None, most: int) -> None:
        """The rows have their blocks for the first step. ``commit``: hears of each block that is full; None: nobody wants to know."""
        self._rows, self._blocks, self._commit = rows, blocks, commit
        rows.look_ahead()
        self.num_seqs = len(rows.sequences)
        self.num_context_tokens = rows.num_context_tokens()
        """That the first step attends to; each one after it ``num_seqs`` more."""
        self.num_passed = 0
        self.num_steps = min(most, rows.steps_to_first_end())
        self._blocks_to_come = rows.num_blocks_lacking(self.num_steps)
        if self._blocks_to_come > blocks.num_available:
            self.num_steps, self._blocks_to_come = 1, 0

    @property
    def is_over(self) -> bool:
        return self.num_passed == self.num_steps

    def cut(self) -> None:
        """The running step is the last one."""
        self.num_steps, self._blocks_to_come = self.num_passed + 1, 0

    def cut_if_short_of_blocks(self) -> None:
        """Others have taken blocks since."""
        if self._blocks_to_come > self._blocks.num_available:
            self.cut()

    def pass_by(self, num_steps: int) -> None:
        """So many more have run; unless that was the last, the next one is running."""
        self.num_passed += num_steps
        assert self.num_passed <= self.num_steps, "no more steps than were foretold"
        full = self._rows.pass_by(num_steps)
        if full and self._blocks_to_come:  # else the running step writes to the blocks that the one before it wrote to
            self._grow()
        if self._commit is not None:
            for row, first, end in full:
                sequence = self._rows.sequences[row]
                self._rows.book_outputs(sequence, TOKEN_ID)
                for block in range(first, end):
                    self._commit(sequence, block)

    def _grow(self) -> None:
        """Blocks for what was written, and for what the running step writes."""
        rows = self._rows.rows_lacking_blocks(0 if self.is_over else 1)
        if rows:
            fresh = self._blocks.allocate(len(rows))
            assert fresh is not None, "there was room when the steps were foretold"
            self._blocks_to_come -= len(rows)
            for row, block in zip(rows, fresh, strict=True):
                self._rows.add_block(self._rows.sequences[row], block)
