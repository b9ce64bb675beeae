"""Ranks on a CPU: threads of one process, which read each other's tensors where they are.

A rank that fails ends the step for all: the others find ``RankFailedError`` where they would have waited.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import RankFailedError
from ..model.ranks import Rank

Mailbox = queue.SimpleQueue[Tensor | None]
"""What one rank gives another, in order; None: the giver has failed."""


def mailboxes(size: int) -> list[list[Mailbox]]:
    """[from][to]."""
    return [[queue.SimpleQueue() for _ in range(size)] for _ in range(size)]


class HostRank(Rank):
    def __init__(self, number: int, boxes: Sequence[Sequence[Mailbox]]) -> None:
        """``boxes``: see ``mailboxes``; the same for all ranks."""
        super().__init__(number, len(boxes))
        self._boxes = boxes
        self._others = [other for other in range(self.size) if other != number]

    def sum(self, x: Tensor) -> Tensor:
        """In float32, in the order of ranks. A tensor that others were given is not written to any more."""
        first, second, *more = self._parts(x)
        total = first.float() + second
        for part in more:
            total += part
        return total.to(x.dtype)

    def joined(self, part: Tensor, width: int) -> Tensor:
        return torch.cat(self._parts(part), dim=1)

    def exchanged(self, parts: Tensor) -> Tensor:
        """A tensor that others were given is not written to any more."""
        for other in self._others:
            self._give(parts[other], [other])
        return torch.stack(
            [parts[other] if other == self.number else self._from(other) for other in range(self.size)]
        )

    def shared(self, tokens: Tensor | None, count: int) -> Tensor:
        if tokens is None:
            return self._from(0)
        self._give(tokens, self._others)
        return tokens

    def agreed(self, number: float) -> float:
        mine = torch.tensor([number], dtype=torch.float64)
        return HostRank.shared(self, None if self.number else mine, 1).item()

    def fail(self) -> None:
        for other in self._others:
            self._boxes[self.number][other].put(None)

    def forget(self) -> None:
        for other in self._others:
            box = self._boxes[other][self.number]
            while not box.empty():
                box.get()

    def _parts(self, own: Tensor) -> list[Tensor]:
        """Those of all ranks."""
        self._give(own, self._others)
        return [own if other == self.number else self._from(other) for other in range(self.size)]

    def _give(self, x: Tensor, to: Sequence[int]) -> None:
        for other in to:
            self._boxes[self.number][other].put(x)

    def _from(self, other: int) -> Tensor:
        given = self._boxes[other][self.number].get()
        if given is None:
            raise RankFailedError(f"rank {other} of this worker failed in this step")
        return given
