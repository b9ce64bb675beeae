"""Which sequences the rows of the next decode step hold, and which come into the batch later. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from .rows import DecodeRows
from .sequences import DecodeSequence


class BatchMembers:
    """Adds to the rows and takes out of them."""

    def __init__(self, rows: DecodeRows) -> None:
        self._rows = rows
        self._joining: list[DecodeSequence] = []
        self._apart: list[list[DecodeSequence]] = []
        """Groups of a step that raised: the next step has the last one alone."""

    @property
    def are_tried_apart(self) -> bool:
        """Whether some are known to be in a group that made a step raise."""
        return bool(self._apart)

    def add(self, sequence: DecodeSequence) -> None:
        """It takes part as soon as it can."""
        self._joining.append(sequence)

    def remove(self, sequence: DecodeSequence) -> None:
        """It takes part no more. What the model has drafted of it is dropped."""
        if sequence.model_drafts is not None:
            sequence.model_drafts.take()
        if sequence.row >= 0:
            self._rows.leave(sequence)
        elif sequence in self._joining:
            self._joining.remove(sequence)

    def add_left(self, sequences: Iterable[DecodeSequence]) -> None:
        """A step has not run: add those that were to have their last token by it."""
        for sequence in sequences:
            if sequence.row < 0 and not sequence.paused and sequence not in self._joining:
                self._joining.append(sequence)

    def try_apart(self, *groups: list[DecodeSequence]) -> None:
        """Have each group, the last one first, take part in a step alone."""
        self._apart += groups

    def admit(self) -> None:
        """Take joined sequences into the batch, except those whose grammar is still being compiled, and those
        still in a step: their newest token is not known."""
        for sequence in self._joining:
            if not sequence.state.lacks_matcher and not sequence.in_flight:
                self._rows.enter(sequence)
        self._joining = [sequence for sequence in self._joining if sequence.row < 0]

    def admit_apart(self) -> bool:
        """Only the next group of a step that raised is in the batch; the others stay with the joining ones.
        Return False if all groups have ended meanwhile."""
        group: list[DecodeSequence] = []
        while self._apart and not group:
            group = [s for s in self._apart.pop() if not (s.ended or s.paused)]
        if not group:
            self.admit()
            return False
        for sequence in [s for s in self._rows.sequences if s not in group]:
            self._rows.leave(sequence)
            self._joining.append(sequence)
        for sequence in group:
            if sequence.row < 0:
                self._joining.remove(sequence)
                self._rows.enter(sequence)
        return True
