"""Copies blocks, or the same slice of each, between a pool and a packed buffer: one launch for what a mover
sends or has received.

Bytes: each byte once in, once out. No FLOPs. ``first_byte`` and the buffer's width choose the slice: whole
blocks, or some layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 8  # bytes; sixteen a thread and load
WORDS = 2048  # of one program


def pack_blocks(pool: Tensor, blocks: Tensor, packed: Tensor, first_byte: int = 0) -> None:
    """packed[i] = pool[blocks[i], first_byte : first_byte + width]; uint8 [num_blocks, block_bytes], int [n],
    uint8 [n, width]."""
    _launch(pool, blocks, packed, first_byte, unpack=False)


def unpack_blocks(packed: Tensor, blocks: Tensor, pool: Tensor, first_byte: int = 0) -> None:
    """pool[blocks[i], first_byte : first_byte + width] = packed[i]. No two of ``blocks`` may be the same."""
    _launch(pool, blocks, packed, first_byte, unpack=True)


def _launch(pool: Tensor, blocks: Tensor, packed: Tensor, first_byte: int, unpack: bool) -> None:
    (n, width), block_bytes = packed.shape, pool.shape[1]
    assert len(blocks) == n
    assert first_byte + width <= block_bytes
    assert first_byte % WORD == width % WORD == block_bytes % WORD == 0
    assert pool.is_contiguous()
    assert packed.is_contiguous()
    # A GPU reads 16 bytes at a time where it knows that each slice begins at a multiple of them.
    unit = (
        2 * WORD if block_bytes % (2 * WORD) == first_byte % (2 * WORD) == width % (2 * WORD) == 0 else WORD
    )
    _copy_kernel[(n, triton.cdiv(width // WORD, WORDS))](
        pool.view(torch.int64), blocks, packed.view(torch.int64), first_byte // unit, width // unit,
        BLOCK_WORDS=block_bytes // WORD, UNIT=unit // WORD, WORDS=WORDS, UNPACK=unpack, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "width"])
def _copy_kernel(
    pool,
    blocks,
    packed,
    first,
    width,
    BLOCK_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """``first``, ``width``: of the slice, in units of UNIT words. They follow a mover's measured rate, so
    that they must not be compiled in."""
    i = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = words < width * UNIT
    in_pool = pool + tl.load(blocks + i).to(tl.int64) * BLOCK_WORDS + first.to(tl.int64) * UNIT + words
    in_packed = packed + i * width * UNIT + words
    if UNPACK:
        tl.store(in_pool, tl.load(in_packed, mask=inside), mask=inside)
    else:
        tl.store(in_packed, tl.load(in_pool, mask=inside), mask=inside)
