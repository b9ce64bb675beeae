"""Prompt and output lengths, drawn together.

Two descriptions, which keep the correlation of the two lengths in two ways:

- ``marginals``: a distribution for each, tied by a Gaussian copula: normal scores with correlation
  ``correlation`` are drawn, and each is mapped through its own distribution, which stays exactly as given.
  ``correlation`` is that of the scores (near Spearman's of the lengths).
- ``joint``: a table of how many requests of a trace had each pair of length classes. Any dependence survives,
  down to the width of a class; within a class of both lengths the two are independent and uniform. ``fit.py``
  makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from .notation import LENGTHS

CHUNK = 4096
Spec = Annotated[str, Field(pattern=LENGTHS)]
Whole = NDArray[np.int64]


class MarginalLengths(BaseModel):
    """Specs: ``N``, ``uniform:LOW,HIGH``, ``normal:MEAN,DEVIATION`` or ``lognormal:MEDIAN,SIGMA``, in
    tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["marginals"] = "marginals"
    prompt: Spec
    output: Spec
    correlation: float = Field(default=0.0, ge=-1, le=1)

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Whole, Whole]:
        """``count`` prompt and output lengths."""
        first, second = rng.standard_normal((2, count))
        tied = self.correlation * first + math.sqrt(1 - self.correlation**2) * second
        return lengths_at(self.prompt, first), lengths_at(self.output, tied)


class JointLengths(BaseModel):
    """Class ``i`` of a length is from ``edges[i]`` to before ``edges[i + 1]``; a cell is (prompt class,
    output class, requests)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["joint"] = "joint"
    prompt_edges: tuple[int, ...] = Field(min_length=2)
    output_edges: tuple[int, ...] = Field(min_length=2)
    cells: tuple[tuple[int, int, int], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> JointLengths:
        for edges in (self.prompt_edges, self.output_edges):
            if edges[0] < 1 or any(low >= high for low, high in pairwise(edges)):
                raise ValueError("edges must rise and begin at 1 or more")
        if any(
            not (
                0 <= prompt < len(self.prompt_edges) - 1
                and 0 <= output < len(self.output_edges) - 1
                and count > 0
            )
            for prompt, output, count in self.cells
        ):
            raise ValueError("cells must name classes between the edges, with a count above 0")
        return self

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Whole, Whole]:
        """``count`` prompt and output lengths."""
        cells = np.array(self.cells)
        chosen = cells[rng.choice(len(cells), count, p=cells[:, 2] / cells[:, 2].sum())]
        prompt, output = (
            rng.integers(np.array(edges)[chosen[:, side]], np.array(edges)[chosen[:, side] + 1])
            for side, edges in enumerate((self.prompt_edges, self.output_edges))
        )
        return prompt, output


Lengths = Annotated[MarginalLengths | JointLengths, Field(discriminator="kind")]


def draw_pairs(
    lengths: MarginalLengths | JointLengths, rng: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """(prompt, output) lengths, without end."""
    while True:
        prompt, output = lengths.draw(CHUNK, rng)
        yield from zip(prompt.tolist(), output.tolist(), strict=True)


def lengths_at(spec: str, scores: NDArray[np.float64]) -> Whole:
    """Whole lengths of at least 1 where the distribution of ``spec`` has the quantiles of these standard
    normal scores."""
    if ":" not in spec:
        return np.full(len(scores), max(1, int(spec)))
    kind, numbers = spec.split(":")
    first, second = (float(number) for number in numbers.split(","))
    match kind:
        case "uniform":
            low, high = int(first), int(second) + 1
            drawn = np.minimum(np.floor(low + (high - low) * _normal_cdf(scores)), high - 1)
        case "normal":
            drawn = first + second * scores
        case _:
            drawn = first * np.exp(second * scores)
    lengths: Whole = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return lengths


def _normal_cdf(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * math.erfc(-score / math.sqrt(2)) for score in scores.tolist()])
