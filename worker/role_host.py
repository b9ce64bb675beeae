"""What a worker has from its process, where that can change its role, or has both: it may not be the only one over these blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engine.cache.block_manager import BlockManager


def worker_name(process: str, role: str) -> str:
    """How the worker is called that a process is in one of its roles."""
    return f"{process}:{role}"


@dataclass(frozen=True, slots=True)
class RoleHost:
    """``process``: its name; ``blocks``: of its one KV cache; ``flip``: has the worker of the role of this name begin beside this one;
    False: it cannot yet, one of that role is still leaving; ``incarnations``: gives the next number of any of its workers."""

    process: str
    blocks: BlockManager
    flip: Callable[[str], bool]
    incarnations: Callable[[], int]
    linger_s: float = 1.0
    """A worker whose role is over answers its peers for so long: what is leased to it there may wait for a last word."""
    mixed: bool = False
    """It is of both roles, for good."""
    for_decode: Callable[[], int] = lambda: 0
    """How many blocks prompts are to leave to the sequences that this process generates for."""

    def hands_to_itself(self, decode_worker: str) -> bool:
        """Whether the blocks of a prompt that is computed here are where this worker will want them."""
        return self.mixed and decode_worker == worker_name(self.process, "decode")
