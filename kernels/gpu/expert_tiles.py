"""Which rows of a step an expert's tiles hold, found on the device: see ``mixture.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """
    order    int64 [num_tokens * num_chosen]  token * num_chosen + place, sorted by expert; those of experts
                                              that are not held come last, in no tile
    starts   int32 [experts held + 1]         of each expert's rows in ``order``
    ends     int32 [experts held]             number of tiles of the experts up to this one
    """

    order: Tensor
    starts: Tensor
    ends: Tensor

    def most(self, rows: int) -> int:
        """Upper bound of the number of tiles of ``rows`` rows."""
        return -(-len(self.order) // rows) + min(len(self.ends), len(self.order))

    @property
    def num_rows(self) -> Tensor:
        """int32 [1]: those of the experts held."""
        return self.starts[-1:]


def plan_tiles(experts: Tensor, num_held: int, rows: int) -> ExpertTiles:
    """On the device, without a look at what was chosen. Experts from number ``num_held`` on are not here."""
    by_expert, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_held + 1, dtype=torch.int32, device=experts.device)
    starts = torch.searchsorted(by_expert, numbers, out_int32=True)
    ends = ((starts[1:] - starts[:-1] + (rows - 1)) // rows).cumsum(0, dtype=torch.int32)
    return ExpertTiles(order, starts, ends)


@triton.jit
def rows_of_tile(
    tile, order, starts, ends, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr,
    SORTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile's expert; which of its rows are there, the rows of x that they are, and their places in y."""
    numbers = tl.arange(0, PADDED)
    before = tl.load(ends + numbers, mask=numbers < EXPERTS, other=2147483647) <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    first_tile = 0
    if expert > 0:
        first_tile = tl.load(ends + expert - 1)
    begin = tl.load(starts + expert) + (tile - first_tile) * ROWS
    rows = begin + tl.arange(0, ROWS)
    real = rows < tl.load(starts + expert + 1)
    places = tl.load(order + rows, mask=real, other=0)
    sources = rows.to(tl.int64) if SORTED else places // CHOSEN
    to = places if SORTED else rows.to(tl.int64)
    return expert, real, tl.where(real, sources, 0), to
