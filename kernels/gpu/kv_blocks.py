"""What happens to KV blocks on the device before and behind a mover: their checksums, and copies.

The checksum is XXH3 (64 bits, seed 0): the very number that ``xxhash.xxh3_64`` gives for the same bytes on a
CPU. For inputs of more than 240 bytes XXH3 (Y. Collet; its specification is in the xxHash repository) is
eight 64-bit lanes over pages of 1024 bytes, each of 16 stripes of 8 words w[s][i], with S the words of its
secret:

    a page:      lane[i] += sum over s of  w[s][i ^ 1] + low32(x) * high32(x),  x = w[s][i] ^ S[s + i]
    after it:    lane[i] = (lane[i] ^ lane[i] >> 47 ^ S[16 + i]) * 0x9E3779B1

All arithmetic is modulo 2^64. The sums are most of the work and independent: one kernel makes them at the
memory's speed, 64 bytes for 1024. Only the second line is a chain: a second kernel walks it, one program a
block, 8192 steps for a block of 8 MiB.
Bytes: each byte of a block once. About 1.5 integer operations a byte.

Copies are of blocks, or of the same slice of each, between a pool and a packed buffer: one launch for what a
mover sends or has received. Bytes: each byte once in, once out. ``first_byte`` and the buffer's width choose
the slice: whole blocks, or some layers.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

PAGE = 128  # words
PAGES_AT_ONCE = 8
SHORTEST = 241  # bytes; shorter inputs are hashed in another way
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)  # the default secret of the specification; its first 192 bytes are used
STARTS = (0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
          0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1)  # fmt: skip
WORD = 8  # bytes; sixteen a thread and load
WORDS = 2048  # of one program of a copy


def block_checksums(pool: Tensor, blocks: Tensor) -> Tensor:
    """Checksums (int64 [n], to be read as unsigned) of ``blocks`` (int [n]) of pool uint8 [num_blocks,
    block_bytes]."""
    block_bytes, n = pool.shape[1], len(blocks)
    assert block_bytes >= SHORTEST
    assert block_bytes % 64 == 0
    assert pool.is_contiguous()
    words = pool.view(torch.int64)
    pages = (block_bytes - 1) // 1024 + 1  # of the last one only the stripes that do not end the block
    sums = torch.empty((n, pages, 8), dtype=torch.int64, device=pool.device)
    table = _table(pool.device)
    _page_sums_kernel[(n, triton.cdiv(pages, PAGES_AT_ONCE))](
        words, blocks, table, sums, BLOCK_WORDS=words.shape[1], NUM_PAGES=pages, PAGES=PAGES_AT_ONCE,
        num_warps=4,
    )  # fmt: skip
    checksums = torch.empty(n, dtype=torch.int64, device=pool.device)
    _chain_kernel[(n,)](
        words, blocks, table, sums, checksums, BLOCK_WORDS=words.shape[1], NUM_PAGES=pages, num_warps=1
    )
    return checksums


def _table(device: torch.device) -> Tensor:
    """int64: the secret's words, then those for the last stripe, for the merge, and the lanes' starts."""
    if device not in _tables:
        shifted = [np.frombuffer(SECRET[start : start + 64], np.uint64) for start in (121, 11)]
        table = np.concatenate(
            [np.frombuffer(SECRET[:192], np.uint64), *shifted, np.array(STARTS, np.uint64)]
        )
        _tables[device] = torch.from_numpy(table.view(np.int64).copy()).to(device)
    return _tables[device]


_tables: dict[torch.device, Tensor] = {}


@triton.jit
def _words(pointer, mask):
    return tl.load(pointer, mask=mask, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _product(x):
    return (x & 0xFFFFFFFF) * (x >> 32)


@triton.jit
def _page_sums_kernel(
    words, blocks, table, sums, BLOCK_WORDS: tl.constexpr, NUM_PAGES: tl.constexpr, PAGES: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    start = words + tl.load(blocks + i).to(tl.int64) * BLOCK_WORDS
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    at = page[:, None, None] * 128 + stripe * 8
    # the block's last 8 words are the last stripe, which the chain takes
    inside = (at < BLOCK_WORDS - 8) & (lane < 8)
    keyed = _words(start + at + lane, inside) ^ _words(table + stripe + lane, inside)
    terms = _product(keyed) + _words(start + at + (lane ^ 1), inside)
    total = tl.sum(terms.to(tl.int64, bitcast=True), 1)
    lanes = tl.arange(0, 8)
    tl.store(
        sums + (i * NUM_PAGES + page[:, None]) * 8 + lanes[None, :],
        total,
        mask=(page < NUM_PAGES)[:, None] & (lanes < 8)[None, :],
    )


@triton.jit
def _chain_kernel(words, blocks, table, sums, checksums, BLOCK_WORDS: tl.constexpr, NUM_PAGES: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 8)
    every = lane < 8
    state = _words(table + 40 + lane, every)
    scramble = _words(table + 16 + lane, every)
    own = sums + i * (NUM_PAGES * 8) + lane
    # unrolled: the loads do not wait for the chain
    for page in tl.range(0, NUM_PAGES - 1, loop_unroll_factor=16):
        state += _words(own + page * 8, every)
        state = (state ^ (state >> 47) ^ scramble) * 0x9E3779B1
    state += _words(own + (NUM_PAGES - 1) * 8, every)
    last = words + tl.load(blocks + i).to(tl.int64) * BLOCK_WORDS + (BLOCK_WORDS - 8)
    state += _product(_words(last + lane, every) ^ _words(table + 24 + lane, every)) + _words(
        last + (lane ^ 1), every
    )

    first, second = tl.split(tl.reshape(state ^ _words(table + 32 + lane, every), [4, 2]))
    folded = (first * second) ^ tl.umulhi(first, second)
    length = tl.full([1], BLOCK_WORDS * 8, tl.uint64)
    mixed = (
        tl.sum(folded.to(tl.int64, bitcast=True), 0).to(tl.uint64, bitcast=True) + length * 0x9E3779B185EBCA87
    )
    mixed ^= mixed >> 37
    mixed *= 0x165667919E3779F9
    mixed ^= mixed >> 32
    tl.store(checksums + i + tl.arange(0, 1), mixed.to(tl.int64, bitcast=True))


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
    pool, blocks, packed, first, width, BLOCK_WORDS: tl.constexpr, UNIT: tl.constexpr, WORDS: tl.constexpr,
    UNPACK: tl.constexpr,
):  # fmt: skip
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
