"""The number of blocks of a worker's KV cache, and the longest sequence: pure.

room on a GPU   utilization x the card's memory - this worker's weights and other memory there
                - memory of its largest step - GPU_CONTEXT_BYTES; at most what is free
room on a CPU   utilization x (free memory + KV caches of the same cluster on this host
                - weights still to be loaded) / workers that share it; a part remains free
blocks          room / bytes of a block; on a CPU no more than max_num_seqs sequences of max_model_len can use
max_model_len   the model's, or what the blocks hold of one sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import OutOfMemoryError

GIB = 1 << 30
GPU_CONTEXT_BYTES = GIB  # CUDA's context, library workspaces, captured graphs
HOST_HEADROOM = 0.2  # share of the free memory that is left to other programs in any case
SHORTEST_TOKENS = 256  # a cache that nobody has sized, and that holds no sequence of these, is of no use


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class KVCacheWish:
    """What is asked for. ``num_blocks`` and ``num_bytes`` are explicit and win over ``room``, the bytes there
    are for the cache."""

    block_bytes: int
    block_size: int  # tokens
    model_len: int  # the model's own longest sequence
    max_model_len: int | None = None  # what a user has set
    max_num_seqs: int | None = 64  # None: as many as there is room for
    num_blocks: int | None = None
    num_bytes: int | None = None
    state_blocks: int = 0  # of a sequence's state

    @property
    def fixed_blocks(self) -> int:
        """Blocks that a sequence needs however long it is: for two copies of its state in each role, and a
        last, partial block that a worker of both hands over to itself."""
        return 4 * self.state_blocks + 1 if self.state_blocks else 0


def kv_cache_size(wish: KVCacheWish, room: int) -> KVCacheSize:
    """Lowers ``max_model_len`` where none was set and the model's own does not fit. Raises OutOfMemoryError
    where one that was set does not fit, or next to nothing does."""
    length = wish.max_model_len or wish.model_len
    needed = -(-length // wish.block_size) + wish.fixed_blocks
    if wish.num_blocks is not None or wish.num_bytes is not None:
        num_blocks, shortest = wish.num_blocks or (wish.num_bytes or 0) // wish.block_bytes, wish.block_size
        more = "raise --kv-cache-gib or --num-blocks"
    else:
        shortest = min(length, SHORTEST_TOKENS)
        num_blocks = room // wish.block_bytes
        if wish.max_num_seqs is not None:
            num_blocks = min(num_blocks, needed * wish.max_num_seqs)
        more = (
            "end what else uses this memory, or raise --gpu-memory-utilization (of a KV cache in host "
            "memory: --cpu-memory-utilization)"
        )
    if num_blocks >= needed:
        return KVCacheSize(num_blocks, length)
    lowered = max(0, num_blocks - wish.fixed_blocks) * wish.block_size
    if wish.max_model_len is not None:
        raise OutOfMemoryError(
            f"the KV cache holds {num_blocks} blocks of {wish.block_bytes / 2**10:.0f} KiB, but one sequence "
            f"of {length} tokens "
            f"needs {needed}; lower --max-model-len{f' to {lowered}' if lowered else ''}, or {more}"
        )
    if lowered < shortest:
        raise OutOfMemoryError(
            f"there is room for {num_blocks} KV blocks of {wish.block_bytes / 2**10:.0f} KiB, which is for "
            f"sequences of {lowered} tokens; {shortest} are the least: {more}"
        )
    return KVCacheSize(num_blocks, lowered)


def shrunk(wish: KVCacheWish, free: int) -> KVCacheWish:
    """A size that was asked for and no longer fits, cut down to most of the ``free`` bytes; what fits stays
    as it is."""
    asked = wish.num_blocks * wish.block_bytes if wish.num_blocks is not None else wish.num_bytes or 0
    if asked <= free:
        return wish
    return replace(wish, num_blocks=int((1 - HOST_HEADROOM) * free) // wish.block_bytes, num_bytes=None)


def gpu_room(*, total: int, free: int, used: int, step: int, utilization: float) -> int:
    """Bytes for the KV cache of a worker that may use ``utilization`` of a card in all. ``used``: what it has
    there so far; ``step``: what its largest step will take."""
    return max(
        0,
        min(int(utilization * total) - used - step - GPU_CONTEXT_BYTES, free - step - GPU_CONTEXT_BYTES // 2),
    )


def host_room(
    *, free: int, pending: int, siblings: Sequence[int], weights: int, utilization: float, sharers: int = 1
) -> int:
    """Bytes of host memory for the KV cache of one of ``sharers`` workers of a cluster on this host.

    ``free``: bytes free now, with this worker's weights loaded; ``pending``: bytes that other workers have
    claimed of it; ``siblings``: KV caches of the same cluster, counted as free, so that the first worker gets
    no more than the others; ``weights``: bytes of one worker's weights.
    """
    left = max(0, free - pending)
    absent = max(0, sharers - 1 - len(siblings)) * weights
    before = left + (sum(siblings) if sharers > 1 else 0) - absent
    return max(0, min(int(utilization * before / sharers), int((1 - HOST_HEADROOM) * left)))


def step_bytes(
    *,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    num_tokens: int,
    num_seqs: int,
    itemsize: int,
) -> int:
    """About what the largest step takes beside weights and cache: activations of ``num_tokens``, float32
    logits of ``num_seqs`` rows and their copies while they are sorted."""
    activations = num_tokens * (6 * hidden_size + 3 * intermediate_size) * itemsize
    return activations + 4 * num_seqs * vocab_size * 4
