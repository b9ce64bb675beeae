"""Patches of an image: their numbers, their places, and the windows in which they attend.

Patches lie in groups of merge_size x merge_size, which become one row of embeddings each: groups by rows, and
patches by rows within their group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .names import Tower
from .pixel_rules import PixelRules


def grid_of(pixels: Tensor, tower: Tower) -> tuple[int, int]:
    """Rows and columns of patches of an image [height, width, 3]."""
    return pixels.shape[0] // tower.patch_size, pixels.shape[1] // tower.patch_size


def patches_of(pixels: Tensor, tower: Tower, dtype: torch.dtype) -> Tensor:
    """[patches, 3 * num_frames * patch_size * patch_size] of uint8 [height, width, 3]."""
    (rows, columns), side = grid_of(pixels, tower), tower.patch_size
    patches = grouped(pixels.view(rows, side, columns, side, 3).transpose(1, 2), tower.merge_size)
    channels = patches.flatten(1, 2).int().unbind(2)  # 3 of [patches, patch_size * patch_size]
    levels = levels_of(tower.pixels).to(pixels.device, dtype)
    values = torch.stack([of[channel] for of, channel in zip(levels, channels, strict=True)], dim=1)
    return values[:, :, None].expand(-1, -1, tower.num_frames, -1).flatten(1)


def levels_of(rules: PixelRules) -> Tensor:
    """float32 [3, 256]: what becomes of each value of a channel, rounded as by transformers' image
    processors: the product in float64, the rest in float32."""
    mean, std = (torch.tensor(of, dtype=torch.float32)[:, None] for of in (rules.mean, rules.std))
    return ((torch.arange(256, dtype=torch.float64) * rules.factor).float() - mean) / std


def places_of(rows: int, columns: int, merge_size: int) -> Tensor:
    """int64 [patches, 2]: row and column of each patch."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return grouped(torch.stack((row, column), dim=-1), merge_size)


def grouped(grid: Tensor, merge_size: int) -> Tensor:
    """[rows * columns, ...], in the order of patches, of [rows, columns, ...]."""
    (rows, columns), m, rest = grid.shape[:2], merge_size, grid.shape[2:]
    groups = grid.reshape(rows // m, m, columns // m, m, *rest).transpose(1, 2)
    return groups.reshape(rows * columns, *rest)


class Windows(NamedTuple):
    """Windows whose patches attend to each other alone.

    order  int64 [patches]: which patch is at each place: groups stay together, and those of a window
    back   int64 [groups]: at which place a group is
    runs   windows of one size lie side by side: their number and their size, in patches
    """

    order: Tensor
    back: Tensor
    runs: tuple[tuple[int, int], ...]


def windows_of(rows: int, columns: int, tower: Tower) -> Windows:
    """Split ``rows`` x ``columns`` patches into windows of ``tower.window`` groups a side, smaller ones at
    the edges; or into one window."""
    rows, columns, of_group = rows // tower.merge_size, columns // tower.merge_size, tower.merge_size**2
    side = tower.window or max(rows, columns)
    across = -(-columns // side)
    number = ((torch.arange(rows) // side)[:, None] * across + torch.arange(columns) // side).flatten()
    sizes = torch.bincount(number)
    groups = torch.argsort(sizes[number] * len(sizes) + number, stable=True)
    order = (groups[:, None] * of_group + torch.arange(of_group)).flatten()
    found, counts = torch.unique(sizes, return_counts=True)
    runs = zip(counts.tolist(), (found * of_group).tolist(), strict=True)
    return Windows(order, torch.argsort(groups), tuple(runs))
