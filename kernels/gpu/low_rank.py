"""Low-rank updates of linear layers (Hu et al., LoRA, 2021): out += B A x, by row, of the row's own adapter.

FLOPs: 2 num_tokens ranks (in_features + out_features). Bytes: A and B of each adapter once for each tile of
ROWS rows that has it. Two kernels: h = A x in parts of SPLIT inputs, then out += B h; h is the sum of its
parts in order, in float32, then rounded to B's type.

The first row of its adapter in a tile leads: its program computes all rows of the tile that have the adapter.
Grids depend on numbers of rows and sizes alone, and a row's sums do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

ROWS, COLUMNS = 16, 128
SPLIT, BLOCK_K = 1024, 128  # inputs
UNIT = 16  # ranks
MOST_RANKS = 32  # at a time
FEW_ROWS = 256  # up to these each row that may lead has a program; of more, each tile: most would do nothing


class GpuLowRank:
    """See ``low_rank.LowRank``."""

    def __init__(
        self, in_features: int, out_features: int, max_rank: int, num_slots: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        ranks, blocks = triton.cdiv(max_rank, UNIT) * UNIT, triton.cdiv(out_features, COLUMNS)
        self._a = torch.zeros((num_slots, ranks, in_features), dtype=dtype, device=device)
        self._b = torch.zeros((num_slots, out_features, ranks), dtype=dtype, device=device)
        # [first, last) of the ranks that are not zero, in units: of A, then of each block of B's columns
        self._bounds = torch.zeros((num_slots, 1 + blocks, 2), dtype=torch.int32, device=device)

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Copies whole and from the host: then they are there when this returns."""
        ranks = self._a.shape[1]
        whole = pad(b.to("cpu", self._b.dtype), (0, ranks - len(a)))
        columns = pad(whole, (0, 0, 0, -len(whole) % COLUMNS)).view(-1, COLUMNS, ranks // UNIT, UNIT)
        used = (columns != 0).any(3).any(1).int()  # [blocks, units]
        last = (used * torch.arange(1, used.shape[1] + 1)).amax(1)
        bounds = torch.stack([used.argmax(1), last], 1)
        units = torch.tensor([[0, triton.cdiv(len(a), UNIT)]])
        self._a[slot].copy_(pad(a.to("cpu", self._a.dtype), (0, 0, 0, ranks - len(a))))
        self._b[slot].copy_(whole)
        self._bounds[slot].copy_(torch.cat([units, bounds]).int())

    def clear(self, slot: int) -> None:
        self._bounds[slot].copy_(torch.zeros(self._bounds.shape[1:], dtype=torch.int32))

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        (m, k), (_, n, ranks) = x.shape, self._b.shape
        assert (out.shape, k, x.stride(1)) == ((m, n), self._a.shape[2], 1)
        assert out.is_contiguous()
        tiles, leaders = triton.cdiv(m, ROWS), 1 if m <= FEW_ROWS else ROWS
        splits, block = triton.cdiv(k, SPLIT), min(MOST_RANKS, triton.next_power_of_2(ranks))
        parts = torch.empty((splits, m, ranks), dtype=torch.float32, device=x.device)
        sizes = {"RANKS": ranks, "BLOCK_R": block, "ROWS": ROWS, "UNIT": UNIT, "num_warps": 4}
        step = self._bounds.stride(0)
        _down_kernel[(tiles, ROWS // leaders, splits * triton.cdiv(ranks, block))](
            x, self._a, self._bounds, slots, parts, m, x.stride(0), leaders, K=k, STEP=step, SPLITS=splits,
            SPLIT=SPLIT, BLOCK_K=BLOCK_K, **sizes,
        )  # fmt: skip
        _up_kernel[(tiles, ROWS // leaders, triton.cdiv(n, COLUMNS))](
            out, self._b, self._bounds, slots, parts, m, leaders, N=n, STEP=step, SPLITS=splits,
            COLUMNS=COLUMNS, **sizes,
        )  # fmt: skip


@triton.jit
def leader(own, place, ROWS: tl.constexpr):
    """The slot of the tile's row ``place``, or -1 where another row leads or there is none. own: the slots of
    all its rows."""
    lane = tl.arange(0, ROWS)
    slot = tl.max(tl.where(lane == place, own, -1), 0)
    before = tl.sum(((own == slot) & (lane < place)).to(tl.int32), 0)
    return tl.where(before == 0, slot, -1).to(tl.int64)


@triton.jit(do_not_specialize=["m", "leaders"], do_not_specialize_on_alignment=["slots"])
def _down_kernel(
    x, a, bounds, slots, parts, m, stride_x, leaders, K: tl.constexpr, STEP: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    split, ranks = tl.program_id(2) % SPLITS, tl.program_id(2) // SPLITS * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(slots + rows, mask=rows < m, other=-1)
    for i in range(leaders):
        slot = leader(own, tl.program_id(1) * leaders + i, ROWS)
        if slot >= 0:
            there = ranks < tl.load(bounds + slot * STEP + 1) * UNIT
            mine = (own == slot)[:, None]
            acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
            for start in tl.range(0, SPLIT, BLOCK_K, num_stages=3):
                k = split * SPLIT + start + tl.arange(0, BLOCK_K)
                inside = (k < K)[None, :]
                x_rows = tl.load(
                    x + rows.to(tl.int64)[:, None] * stride_x + k[None, :], mask=mine & inside, other=0.0
                )
                a_rows = tl.load(
                    a + (slot * RANKS + ranks)[:, None] * K + k[None, :],
                    mask=there[:, None] & inside,
                    other=0.0,
                )
                acc = tl.dot(x_rows, tl.trans(a_rows), acc, input_precision="ieee")
            at = parts + (split * m + rows).to(tl.int64)[:, None] * RANKS + ranks[None, :]
            tl.store(at, acc, mask=mine & there[None, :])


@triton.jit(do_not_specialize=["m", "leaders"], do_not_specialize_on_alignment=["slots"])
def _up_kernel(
    out, b, bounds, slots, parts, m, leaders, N: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.load(slots + rows, mask=rows < m, other=-1)
    for i in range(leaders):
        slot = leader(own, tl.program_id(1) * leaders + i, ROWS)
        if slot >= 0:
            bound = bounds + slot * STEP + 2 + 2 * tl.program_id(2)
            first, last = tl.load(bound) * UNIT, tl.load(bound + 1) * UNIT
            mine = (own == slot)[:, None]
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for start in range(first, last, BLOCK_R):
                ranks = start + tl.arange(0, BLOCK_R)
                there = (ranks < last)[None, :]
                h = tl.zeros([ROWS, BLOCK_R], tl.float32)
                for split in range(SPLITS):
                    at = parts + (split * m + rows).to(tl.int64)[:, None] * RANKS + ranks[None, :]
                    h += tl.load(at, mask=mine & there, other=0.0)
                b_rows = tl.load(
                    b + (slot * N + columns)[:, None] * RANKS + ranks[None, :],
                    mask=(columns < N)[:, None] & there, other=0.0,
                )  # fmt: skip
                acc = tl.dot(h.to(b_rows.dtype), tl.trans(b_rows), acc, input_precision="ieee")
            if first < last:
                at = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
                mask = mine & (columns < N)[None, :]
                acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
                tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
