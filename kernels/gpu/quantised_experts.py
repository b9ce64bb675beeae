"""The products of a mixture's experts where their weights are quantised: ``quantised_linear.py``'s kernel, a
tile for each of ``expert_tiles.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from ..quantised import QuantisedWeight, Weight, joined_weight, parts_of
from .exact_linear import ProductTile
from .expert_tiles import ExpertTiles
from .quantised_linear import QuantisedLinear, round_rows


class QuantisedExperts:
    """A matrix of each expert, one above the other: ``whole``, which ``own`` were joined to."""

    def __init__(self, own: Sequence[QuantisedWeight], whole: QuantisedWeight, biases: Tensor | None) -> None:
        self._matrix = QuantisedLinear(whole, None if biases is None else biases.flatten(), exact=True)
        self._count, self._rows = len(own), whole.out_features // len(own)
        self._rounds_x, self._orders = whole.rounds_x, None
        if any(of.order is not None for of in own):
            plain = torch.arange(whole.in_features, device=whole.codes.device)
            self._orders = torch.stack([plain if of.order is None else of.order for of in own]).int()

    @classmethod
    def of(
        cls, experts: Sequence[Weight | Sequence[Weight]], biases: Tensor | None
    ) -> QuantisedExperts | None:
        """``biases`` [experts, out_features]. None where their forms differ, as gate's and up's do in
        another act-order."""
        own = [_joined([p for p in parts_of(of) if isinstance(p, QuantisedWeight)]) for of in experts]
        there = [of for of in own if of is not None]
        whole = _joined([replace(of, order=None) for of in there]) if len(there) == len(own) else None
        return None if whole is None else cls(there, whole, biases)

    def __call__(
        self, x: Tensor, tiles: ExpertTiles, tile: ProductTile, chosen: int, sorted_rows: bool
    ) -> Tensor:
        """See ``mixture.grouped_product``."""
        y = torch.empty((len(tiles.order), self._rows), dtype=x.dtype, device=x.device)
        num_rows = tiles.num_rows if sorted_rows else None
        x, x_scales = round_rows(x, num_rows) if self._rounds_x else (x, None)
        grid = tiles.most(tile.rows) * triton.cdiv(self._rows, tile.columns), 1
        self._matrix.launch(
            x, x_scales, y, None, grid, tile, tiles.order, tiles.starts, tiles.ends, self._orders,
            N=self._rows, EXPERTS=self._count, PADDED=max(2, triton.next_power_of_2(self._count)),
            CHOSEN=chosen, SORTED=sorted_rows,
        )  # fmt: skip
        return y


def _joined(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Zeros for all where some have them."""
    if any(part.zeros is not None for part in parts):
        parts = [
            part if part.zeros is not None
            else replace(part, zeros=torch.full_like(part.scales, 2.0 ** (part.bits - 1)))
            for part in parts
        ]  # fmt: skip
    return joined_weight(parts)
