"""How many tokens answers have, by those that have ended and those that still run. Pure.

Short answers end first, and long ones are most of those that run: the mean of neither is that of all. So each
answer counts in every class of lengths that it has left (a life table, https://doi.org/10.2307/2281868):

    share that ends in a class = ended in it / left it, by ending or by growing (those in it: in part)
    mean = sum over classes of the share that gets so far x mean tokens generated there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

EDGES = np.array([0.0, *(4 * 2 ** (i / 2) for i in range(36))])  # between classes of lengths, in tokens
WIDTHS = np.diff(EDGES)
MEMORY = 15  # ended answers after which older ones weigh 1/e
PRIOR = 0.2  # answers as which all kinds together weigh in one kind
Span = tuple[float, float, bool]
"""An answer's tokens before and now, and whether it has ended."""


class LifeTable:
    """Counts answers by length; the newest weigh most."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, len(WIDTHS)))  # ended in a class, passed it, tokens of those that ended
        self._tokens = 1e-6

    @property
    def rate(self) -> float:
        """Ends per token."""
        return float(self._counts[0].sum() / self._tokens)

    def take(self, spans: Sequence[Span]) -> None:
        """Take in what answers have grown by."""
        before, now, has_ended = np.array(spans, float).T[:, :, None]
        last = now[has_ended > 0] - 0.5
        grown = np.where(has_ended > 0, EDGES[1:] <= now - 0.5, _covered(now)) - _covered(before)
        ended, within = np.histogram(last, EDGES)[0], np.histogram(last, EDGES, weights=last + 0.5)[0]
        keep = (1 - 1 / MEMORY) ** len(last)
        weight = (1 - keep) * MEMORY / len(last) if len(last) else 1.0  # mean of the newest
        self._counts = keep * self._counts + weight * np.array([ended, grown.sum(0), within])
        self._counts[1] = np.maximum(0.0, self._counts[1])
        self._tokens = keep * self._tokens + weight * float((now - before).sum())

    def ends(self, prior: np.ndarray) -> np.ndarray:
        """Return the share of those in each class that end there."""
        ended, passed, _ = self._counts
        return np.asarray((ended + PRIOR * prior) / (ended + passed + PRIOR))

    def mean(self, prior: np.ndarray) -> float:
        """Return the mean tokens of an answer."""
        ended, _, tokens = self._counts
        ends = self.ends(prior)
        reach = np.cumprod(np.append(1.0, 1 - ends))[:-1]
        lasts = (tokens + 1e-6 * EDGES[1:]) / (ended + 1e-6)
        return float((reach * ends * lasts).sum())


def _covered(tokens: np.ndarray) -> np.ndarray:
    """Return the share of each class that lies below."""
    return np.asarray(np.clip((tokens - EDGES[:-1]) / WIDTHS, 0.0, 1.0))


class OutputLengths:
    """Call ``take`` with all that has been generated, once."""

    def __init__(self) -> None:
        self._all, self._of_kind = LifeTable(), defaultdict[int, LifeTable](LifeTable)

    def take(self, spans: dict[int, list[Span]]) -> None:
        """Take in what answers have grown by, by kind."""
        for kind, found in spans.items():
            self._of_kind[kind].take(found)
        if spans:
            self._all.take([span for found in spans.values() for span in found])

    def means(self, otherwise: float) -> defaultdict[int, float]:
        """Return the mean tokens of an answer, by kind. ``otherwise``: while none has ended."""
        if not self._all.rate:
            return defaultdict(lambda: otherwise)
        prior = 1 - np.exp(-self._all.rate * WIDTHS)
        every, ends = self._all.mean(prior), self._all.ends(prior)
        means = defaultdict[int, float](lambda: every)
        means |= {kind: table.mean(ends) for kind, table in self._of_kind.items()}
        return means
