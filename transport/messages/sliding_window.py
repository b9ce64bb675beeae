"""Which of a sequence's KV blocks a sliding window has left behind. Pure.

A token at position p attends to positions p - window + 1 to p. A block whose last position is below that is
behind the window of this token and of every later one: it may be released, and need not be sent. Its place in
the sequence's block table stays, as ``NO_BLOCK``.
"""

from __future__ import annotations

NO_BLOCK = -1


def num_behind(num_tokens: int, window: int, block_size: int) -> int:
    """Leading blocks that no token from position ``num_tokens`` on attends to. ``window``: in tokens, the
    widest of all layers; 0: some layer attends to all tokens."""
    return max(0, num_tokens - window + 1) // block_size if window else 0


def held(blocks: list[int]) -> list[int]:
    """The blocks of a table that are still held."""
    return blocks[blocks.count(NO_BLOCK) :] if blocks and blocks[0] == NO_BLOCK else blocks
