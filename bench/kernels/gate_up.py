"""silu(x G^T) * (x U^T) in one kernel, of weights [G above U]: a candidate, to be timed on a GPU.

Bytes: the weights once (4 n hidden) while rows are few, and nothing between two kernels; FLOPs: 4 rows n
hidden. It rounds where a product and ``gate_mul`` do: gate and up to the type of x, then what becomes of
them. Tiles of 64 rows and more sum as ``ExactLinear`` does: gpu_check compares the bits.

If it is faster: ``CudaKernels.linear`` returns a Linear with a method ``gated``, which calls ``gate_up`` for
the numbers of rows where it is, and ``LayerMlp.of`` asks for that method, if the activation is silu
and there is no bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, silu

from ...kernels.gpu.elementwise import gate_mul
from ...kernels.gpu.exact_linear import GROUPED_ROWS, ExactLinear, tile_at
from .compile_bounds import WARP_GROUP_ROWS
from .gpu_timing import Ceilings, Figure, microseconds
from .kernel_checks import ALLOWED, Check
from .kernel_figures import BFLOAT16, ROTATED_BYTES
from .kernel_inputs import randn, relative_error

TWO_KERNELS = "cuBLAS, then silu"


@dataclass(frozen=True, slots=True)
class GateUpTile:
    """``inputs``: of one step of the sums."""

    rows: int
    columns: int  # of gate, and as many of up
    inputs: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} x {self.inputs}, {self.warps} warps, {self.stages} stages"


FEW = (GateUpTile(16, 16, 256, 4, 4), GateUpTile(16, 32, 128, 4, 5), GateUpTile(16, 64, 64, 4, 5))
SOME = (GateUpTile(32, 32, 128, 4, 4), GateUpTile(32, 64, 64, 4, 5))
MORE = (GateUpTile(64, 32, 64, 4, 6), GateUpTile(64, 64, 64, 4, 4))
MANY = (GateUpTile(128, 64, 64, 8, 3), GateUpTile(128, 128, 64, 8, 4))
TILES = {1: FEW, 8: FEW, 32: (*SOME, MORE[1]), 64: MORE, 128: (MORE[1], *MANY), 256: MANY, 512: MANY}
"""By the number of rows: those to be tried."""
DISTINCT_TILES = (*FEW, *SOME, *MORE, *MANY)


def gate_up(x: Tensor, weight: Tensor, tile: GateUpTile) -> Tensor:
    """x [m, hidden], weight [2 n, hidden] -> [m, n]; ``hidden``: a multiple of ``tile.inputs``."""
    (m, k), n = x.shape, len(weight) // 2
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert k == weight.shape[1]
    assert k % tile.inputs == 0
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)](
        x, weight, y, m, n, k, x.stride(0), ROWS=tile.rows, COLUMNS=tile.columns, INPUTS=tile.inputs,
        GROUPED=GROUPED_ROWS, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["m"])
def _gate_up_kernel(
    x, weight, y, m, n, num_inputs, stride_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, GROUPED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_at(tl.program_id(0), tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS), GROUPED)
    rows, columns = tile_m * ROWS + tl.arange(0, ROWS), tile_n * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INPUTS)
    # rows past the end are others anew, and not stored
    a = x + (rows % m).to(tl.int64)[:, None] * stride_x + k[None, :]
    b = weight + (columns % n).to(tl.int64)[:, None] * num_inputs + k[None, :]
    c = b + n.to(tl.int64) * num_inputs
    gate, up = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        own = tl.load(a + start)
        gate = tl.dot(own, tl.trans(tl.load(b + start)), gate, input_precision="ieee")
        up = tl.dot(own, tl.trans(tl.load(c + start)), up, input_precision="ieee")
    gate, up = gate.to(y.dtype.element_ty).to(tl.float32), up.to(y.dtype.element_ty).to(tl.float32)
    at = y + rows.to(tl.int64)[:, None] * n + columns[None, :]
    gated = (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty)
    tl.store(at, gated, mask=(rows < m)[:, None] & (columns < n)[None, :])


def two_kernels(x: Tensor, weight: Tensor) -> Tensor:
    return gate_mul(linear(x, weight), "silu")


def checks(big: bool) -> Iterator[Check]:
    """Values in each tile, and the bits in those that sum as exact mode does."""
    hidden = 4096 if big else 512
    for tile in DISTINCT_TILES:
        yield Check(f"gate and up, {tile}", ALLOWED[BFLOAT16], partial(_error, tile, hidden))
        if tile.rows >= WARP_GROUP_ROWS:
            yield Check(f"gate and up, {tile}: bits of exact mode", 0, partial(_other_bits, tile, hidden))


def _inputs(tile: GateUpTile, hidden: int, device: str) -> tuple[Tensor, Tensor]:
    """Such that neither rows nor columns fill the last tile."""
    x = randn(2 * tile.rows - 1, hidden, dtype=BFLOAT16, device=device)
    return x, randn(2 * 80, hidden, dtype=BFLOAT16, device=device, seed=1) / 16


def _error(tile: GateUpTile, hidden: int, device: str) -> float:
    x, weight = _inputs(tile, hidden, device)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    return relative_error(gate_up(x, weight, tile), silu(gate) * up)


def _other_bits(tile: GateUpTile, hidden: int, device: str) -> float:
    x, weight = _inputs(tile, hidden, device)
    return float(not torch.equal(gate_up(x, weight, tile), gate_mul(ExactLinear(weight, None)(x), "silu")))


def gate_up_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    """What a decode step or a small prefill takes by two kernels, and by one in each tile."""
    for name, n, k in (("8B", 14336, 4096), ("0.6B", 3072, 1024)) if big else (("tiny", 40, 256),):
        num_bytes = 4 * n * k
        weights = [
            torch.randn((2 * n, k), device=device).to(BFLOAT16)
            for _ in range(int(ROTATED_BYTES / num_bytes) + 2 if big else 1)
        ]
        for m, tiles in TILES.items() if big else ((3, FEW[:1]),):
            x = torch.randn((m, k), device=device).to(BFLOAT16)
            floor = max(num_bytes / ceilings.copy, m * num_bytes / ceilings.flops) * 1e6
            ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {TWO_KERNELS: two_kernels}
            ways |= {str(tile): partial(gate_up, tile=tile) for tile in tiles}
            for way, call in ways.items():
                us = microseconds([partial(call, x, weight) for weight in weights])
                yield Figure(
                    f"gate and up {name}, {m} rows, {way}", us, floor, m * num_bytes / us * 1e6, "FLOP"
                )
