"""y = x W^T + bias whose rows do not depend on how many there are: what cuBLAS does not promise.

Bytes: the weights once (2 out_features in_features) while a step has few rows; FLOPs: 2 num_tokens
out_features in_features.

A tile of y is summed by one program over all of K, ``BLOCK_K`` at a time and in order; no sum is split. The
tile's size does vary with the number of rows, but never its instruction (a warp group's, which takes 64 rows
at least) nor the order along K: a row's bits stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 64
GROUPED_ROWS = 8  # tiles of rows that share a column of weights in the cache


@dataclass(frozen=True, slots=True)
class ProductTile:
    rows: int
    columns: int
    warps: int
    stages: int


def product_tile(num_tokens: int) -> ProductTile:
    if num_tokens <= 64:
        return ProductTile(64, 32, 4, 6)  # many narrow tiles: the weights are what takes time
    return ProductTile(64, 128, 4, 4) if num_tokens <= 512 else ProductTile(128, 128, 8, 4)


class ExactLinear:
    """See ``interface.Linear``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.contiguous()  # [out_features, in_features]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        (m, k), n = x.shape, len(self._weight)
        assert x.stride(1) == 1
        assert k == self._weight.shape[1]
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        tile = product_tile(m)
        _product_kernel[(triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)](
            x, self._weight, self._bias, y, m, x.stride(0), N=n, K=k, ROWS=tile.rows, COLUMNS=tile.columns,
            BLOCK_K=BLOCK_K,
            GROUPED=GROUPED_ROWS, STAGES=tile.stages, BIAS=self._bias is not None, num_warps=tile.warps,
        )  # fmt: skip
        return y


@triton.jit
def product(
    a, b, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, COLUMNS], summed over all of K in order. a [ROWS, BLOCK_K], b [COLUMNS, BLOCK_K]:
    pointers to the first numbers of each row."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            acc = tl.dot(tl.load(a + start), tl.trans(tl.load(b + start)), acc, input_precision="ieee")
        else:
            inside = (start + k < K)[None, :]
            own = tl.load(a + start, mask=inside, other=0.0)
            acc = tl.dot(
                own, tl.trans(tl.load(b + start, mask=inside, other=0.0)), acc, input_precision="ieee"
            )
    return acc


@triton.jit
def tile_at(place, tiles_m, tiles_n, GROUPED: tl.constexpr):
    """Rows and columns, in tiles, of the program at this place: ``GROUPED`` that follow each other share
    columns."""
    first_m = place // (GROUPED * tiles_n) * GROUPED
    in_group = tl.minimum(tiles_m - first_m, GROUPED)
    within = place % (GROUPED * tiles_n)
    return first_m + within % in_group, within // in_group


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    x, weight, bias, y, m, stride_x, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUPED: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program a tile; programs that follow each other share weights."""
    tile_m, tile_n = tile_at(tl.program_id(0), tl.cdiv(m, ROWS), tl.cdiv(N, COLUMNS), GROUPED)
    rows = tile_m * ROWS + tl.arange(0, ROWS)
    columns = tile_n * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    # rows past the end are others anew, and not stored
    a = x + (rows % m).to(tl.int64)[:, None] * stride_x + k[None, :]
    b = weight + (columns % N).to(tl.int64)[:, None] * K + k[None, :]
    acc = product(a, b, K, ROWS, COLUMNS, BLOCK_K, STAGES)
    if BIAS:
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    at = y + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(rows < m)[:, None] & (columns < N)[None, :])
