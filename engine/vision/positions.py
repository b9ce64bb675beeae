"""Positions of patches: angles by which their queries and keys turn, and learned vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .names import Tower


@dataclass(frozen=True, slots=True)
class Turns:
    """Rotary embedding by two positions: the first half of a head's pairs turns by the patch's row, the
    second by its column. The pair of a number is half a head behind it. ``cos``, ``sin``: float32
    [patches, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[patches, heads, head_dim], turned."""
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1).to(x.dtype)


def turns_of(
    places: Tensor, tower: Tower, column_rope: bool, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """``places``: int64 [patches, 2]. ``column_rope``: see ``TowerNames``."""
    if not tower.theta:
        return lambda x: x
    exponents = torch.arange(0, tower.head_dim, 2, dtype=torch.int64).float() / tower.head_dim
    frequencies = 1.0 / (tower.theta**exponents)
    each = frequencies[0::2], frequencies[1::2] if column_rope else frequencies[0::2]
    angles = [place[:, None].float() * of for place, of in zip(places.unbind(1), each, strict=True)]
    turned = torch.cat(angles, dim=1)[:, None].to(device)
    return Turns(turned.cos(), turned.sin())


def stretched_positions(table: Tensor, places: Tensor, rows: int, columns: int) -> Tensor:
    """float32 [patches, D]: the square of learned vectors of ``table`` [..., D], stretched over an image of
    ``rows`` x ``columns`` patches and interpolated between the sixteen nearest."""
    vectors = table.float().flatten(0, -2)
    square = vectors.view(round(len(vectors) ** 0.5), -1, table.shape[-1]).permute(2, 0, 1)[None]
    found = functional.interpolate(square, (rows, columns), mode="bicubic")[0]  # [D, rows, columns]
    return found[:, places[:, 0].to(table.device), places[:, 1].to(table.device)].T


def side_by_side(head_dim: int) -> Tensor:
    """int64 [head_dim]: which of a head's numbers is at each place for ``Turns`` where each pair lies side by
    side, and pairs turn by column and row by turns."""
    columns, rows = torch.arange(head_dim).view(-1, 2, 2).unbind(1)  # [head_dim / 4, 2]
    return torch.cat((rows, columns)).T.flatten()


def learned_positions(table: Tensor, places: Tensor, rows: int, columns: int) -> Tensor:
    """float32 [patches, D]: the learned vectors of ``table`` [grid * grid, D], stretched over an image of
    ``rows`` x ``columns`` patches and interpolated between the four nearest."""
    grid = round(len(table) ** 0.5)
    lengths = torch.tensor((rows, columns))
    at = places.float() * (grid - 1) / (lengths - 1).clamp(min=1)
    low = at.floor().long()
    part, high = at - low, (low + 1).clamp(max=grid - 1)
    found = torch.zeros(len(places), table.shape[1], device=table.device)
    for row, row_share in ((low[:, 0], 1 - part[:, 0]), (high[:, 0], part[:, 0])):
        for column, share in ((low[:, 1], 1 - part[:, 1]), (high[:, 1], part[:, 1])):
            index, weight = row * grid + column, row_share * share
            found += table[index.to(table.device)] * weight[:, None].to(table.device)
    return found
