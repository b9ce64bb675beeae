"""What a one-sided put reads and writes, as runs of bytes at addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import MoverError
from .interface import Item


class Run(NamedTuple):
    source: int
    target: int
    num_bytes: int


def runs(items: Sequence[Item], layers: slice, shape: Sequence[int], num_target_blocks: int, source: int, target: int) -> list[Run]:
    """These layers of blocks of a pool of ``shape`` at address ``source``, into the peer's of ``num_target_blocks`` at ``target``.
    Blocks side by side in both are one run. Raises MoverError for blocks that do not exist."""
    num_blocks, num_layers, layer_bytes = shape
    block_bytes, offset, length = num_layers * layer_bytes, layers.start * layer_bytes, (layers.stop - layers.start) * layer_bytes
    found: list[Run] = []
    for _, own, theirs in items:
        if not (0 <= own < num_blocks and 0 <= theirs < num_target_blocks):
            raise MoverError(f"put of block {own} into block {theirs}: pools of {num_blocks} and {num_target_blocks} blocks")
        run = Run(source + own * block_bytes + offset, target + theirs * block_bytes + offset, length)
        last = found[-1] if found else None
        if last is not None and (last.source + last.num_bytes, last.target + last.num_bytes) == run[:2]:
            found[-1] = Run(last.source, last.target, last.num_bytes + length)
        else:
            found.append(run)
    return found
