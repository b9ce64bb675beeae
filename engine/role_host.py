"""What a worker has from its process, where that can change its role: it may not be the only one over these blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .block_manager import BlockManager


@dataclass(frozen=True, slots=True)
class RoleHost:
    """``process``: its name; ``blocks``: of its one KV cache; ``flip``: has the worker of the role of this name begin beside this one;
    False: it cannot yet, one of that role is still leaving."""

    process: str
    blocks: BlockManager
    flip: Callable[[str], bool]
    linger_s: float = 1.0
    """A worker whose role is over answers its peers for so long: what is leased to it there may wait for a last word."""
