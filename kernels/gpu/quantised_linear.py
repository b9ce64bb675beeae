"""y = x W^T + bias of quantised weights, whose codes are read as they are: see ``quantised.py``.

    y[m][n] = sum over groups g of scale[n][g] * (sum over k in g of x[m][k] (code[n][k] - zero[n][g]))
              - minimum[n][g] * sum over k in g of x[m][k]

Bytes of a step with few rows: the codes (in_features out_features bits / 8) and scales once; FLOPs: 2
num_tokens out_features in_features.

A code less its zero is exact in float16 and in bfloat16. It is multiplied in the inputs' type, and the sum of
each group is scaled in float32: no weight is rounded a second time. With ``rounds_x`` each row of x becomes
int8 with a scale of its own, and sums are whole numbers.

The weights are the left factor: the instruction of a warp group takes that one from registers, where the
codes become numbers, and x from shared memory. Of 4 bits, byte j of a step holds inputs j and TILE + j, so
both halves are tiles of x as it lies.

A tile of y is summed by one program over all of K in order, TILE at a time: a row's bits do not depend on
the others. Steps of few rows, if not exact, have too few tiles to fill a GPU: K is cut into ``splits``
ranges, and the program that finishes a tile last adds up their sums in ascending order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantised import LARGEST, QuantisedWeight
from .exact_linear import GROUPED_ROWS, ProductTile, tile_at
from .expert_tiles import rows_of_tile

MOST_TILE = {4: 64, 8: 128}  # inputs, by bits
FEW_ROWS = 64  # of a step whose K is cut
PROGRAMS_PER_SM = 4  # aimed at by the cuts
LEAST_STEPS = 4  # of a cut
# 1.5 * 2^23: added and subtracted, it rounds to a whole number, ties to even
NEAREST = tl.constexpr(12582912.0)
GROUP_UNIT = 16  # inputs, the least tile of a product


def quantised_tile(num_tokens: int, experts: bool = False) -> ProductTile:
    """Sizes begin at the same numbers of rows as those of ``product_tile``, and at 17: a first decode step
    compiles the smallest. A code becomes a number once for all rows of a tile; ``experts`` have few each."""
    if num_tokens <= 16:
        return ProductTile(16, 64, 4, 5)
    if num_tokens <= (512 if experts else 64):
        return ProductTile(64, 64, 4, 4)
    return ProductTile(128, 64, 4, 3) if num_tokens <= 512 else ProductTile(128, 128, 8, 3)


class QuantisedLinear:
    """See ``interface.Linear``. Groups, if a row has several, are multiples of GROUP_UNIT inputs."""

    def __init__(
        self, weight: QuantisedWeight, bias: Tensor | None, num_sms: int = 1, exact: bool = False
    ) -> None:
        self._n, self._k, self._bits = weight.out_features, weight.in_features, weight.bits
        self._order, self._rounds_x, self._bias, self._exact = weight.order, weight.rounds_x, bias, exact
        self._float4 = weight.float4
        moved = weight.zeros is not None or weight.minimums is not None
        assert not (weight.rounds_x and moved), "int8 inputs, and weights that are not symmetric"
        one_scale = weight.scales.shape[1] == 1 and weight.minimums is None
        self._group = 0 if one_scale else weight.group_size
        assert self._group % GROUP_UNIT == 0, f"groups of {self._group} inputs"
        self._tile = MOST_TILE[self._bits]
        if self._group:
            self._tile = min(self._tile, self._group & -self._group)
        self._step = self._tile * (8 // self._bits)  # inputs
        self._codes = self._in_steps(weight)
        self._scales = self._by_group(weight.scales)
        zeros, minimums = weight.zeros, weight.minimums
        if minimums is not None and zeros is None:
            zeros = torch.zeros_like(minimums)
        self._zeros = None if zeros is None else self._by_group(zeros)
        self._minimums = None if minimums is None else self._by_group(minimums)
        self._splits = self._cuts(num_sms)
        tiles = triton.cdiv(self._n, quantised_tile(1).columns)
        self._arrived = torch.zeros(tiles, dtype=torch.int32, device=weight.codes.device)

    def __call__(self, x: Tensor) -> Tensor:
        m = len(x)
        assert x.stride(1) == 1
        assert x.shape[1] == self._k
        y = torch.empty((m, self._n), dtype=x.dtype, device=x.device)
        if self._order is not None:
            x = x.index_select(1, self._order)
        x, x_scales = round_rows(x) if self._rounds_x else (x, None)
        tile, splits, partials = quantised_tile(m), 1, None
        tiles = triton.cdiv(m, tile.rows) * triton.cdiv(self._n, tile.columns)
        if m <= FEW_ROWS and self._splits > 1:
            kind = torch.int32 if self._rounds_x and not self._group else torch.float32
            splits = self._splits
            partials = torch.empty((tiles, splits, tile.columns, tile.rows), dtype=kind, device=x.device)
        self.launch(
            x, x_scales, y, partials, (tiles, splits), tile, None, None, None, None, N=self._n, EXPERTS=1,
            PADDED=1, CHOSEN=1, SORTED=False,
        )  # fmt: skip
        return y

    def launch(
        self, x: Tensor, x_scales: Tensor | None, y: Tensor, partials: Tensor | None, grid: tuple[int, int],
        tile: ProductTile, *experts: Tensor | None, **sizes: int,
    ) -> None:  # fmt: skip
        """``grid``: tiles of y, and ranges of K; ``experts``, ``sizes``: the kernel's own arguments."""
        _quantised_kernel[grid](
            x, x_scales, self._codes, self._scales, self._zeros, self._minimums, self._bias, y, partials,
            self._arrived, *experts, len(x), x.stride(0), K=self._k, BITS=self._bits, TILE=self._tile,
            GROUP=self._group, SPLITS=grid[1], ROWS=tile.rows, COLUMNS=tile.columns, GROUPED=GROUPED_ROWS,
            STAGES=tile.stages, ROUNDED=self._rounds_x, FLOAT4=self._float4, num_warps=tile.warps,
            enable_fp_fusion=False, **sizes,
        )  # fmt: skip

    def _in_steps(self, weight: QuantisedWeight) -> Tensor:
        """Codes of whole steps: [out, steps * TILE] bytes; of 8 bits without zeros signed."""
        padding = -self._k % self._step
        if self._bits == 4:
            codes = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1)[:, : self._k]
            halves = torch.nn.functional.pad(codes, (0, padding)).view(self._n, -1, 2, self._tile)
            return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()
        codes = weight.codes.view(torch.uint8)
        signed = weight.zeros is None and weight.minimums is None and not weight.is_float8
        codes = torch.nn.functional.pad(codes ^ 128 if signed else codes, (0, padding)).contiguous()
        return codes.view(torch.int8 if signed else weight.codes.dtype)

    def _by_group(self, values: Tensor) -> Tensor:
        """[out, groups] -> [groups of whole steps, out], in 16 bits where these hold all numbers."""
        if self._group:
            groups = triton.cdiv(triton.cdiv(self._k, self._step) * self._step, self._group)
            values = torch.nn.functional.pad(values, (0, groups - values.shape[1]))
        for dtype in (torch.float16, torch.bfloat16):
            if bool((values.to(dtype).float() == values).all()):
                values = values.to(dtype)
                break
        return values.t().contiguous()

    def _cuts(self, num_sms: int) -> int:
        """Ranges of K that a step of few rows has."""
        if self._exact:
            return 1
        steps, columns = triton.cdiv(self._k, self._step), quantised_tile(1).columns
        wanted = PROGRAMS_PER_SM * num_sms // triton.cdiv(self._n, columns)
        most = max(1, min(wanted, steps // LEAST_STEPS))
        return int(triton.cdiv(steps, triton.cdiv(steps, most)))


def round_rows(x: Tensor, num_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [num_tokens, n] -> int8 of the same shape, its scales float32 [num_tokens]. ``num_rows``: see
    ``elementwise.gate_mul``."""
    rows, n = x.shape
    rounded = torch.empty((rows, n), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _round_kernel[(rows,)](
        x, rounded, scales, num_rows, x.stride(0), N=n, COLUMNS=triton.next_power_of_2(n),
        LARGEST=LARGEST["int8"], num_warps=8,
    )  # fmt: skip
    return rounded, scales


@triton.jit
def _round_kernel(
    x, rounded, scales, num_rows, stride, N: tl.constexpr, COLUMNS: tl.constexpr, LARGEST: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if num_rows is not None:  # noqa: SIM102, known when it is compiled
        if row >= tl.load(num_rows):
            return
    columns = tl.arange(0, COLUMNS)
    values = tl.load(x + row * stride + columns, mask=columns < N, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(values), 0), LARGEST)
    tl.store(scales + row, scale)
    scaled = tl.div_rn(values, tl.where(scale > 0.0, scale, 1.0))
    tl.store(rounded + row * N + columns, ((scaled + NEAREST) - NEAREST).to(tl.int8), mask=columns < N)


@triton.jit
def _number(codes, zero, kind: tl.constexpr, BITS: tl.constexpr, FLOAT4: tl.constexpr):
    """codes - zero, exact. ``zero``: float32 [COLUMNS or 1, 1]; of 8 bits may be None."""
    if FLOAT4:  # sign, exponent and mantissa where float16 has them; its exponents are 14 lower
        bits = ((codes.to(tl.int16) & 7) << 9) | ((codes.to(tl.int16) & 8) << 12)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif BITS == 8 and zero is None:
        numbers = codes
    elif BITS == 4 and kind == tl.bfloat16:  # the bits of 128 + code
        numbers = (codes.to(tl.int16) | 0x4300).to(kind, bitcast=True) - (zero + 128.0).to(kind)
    elif BITS == 4 and kind == tl.float16:  # of 1024 + code
        numbers = (codes.to(tl.int16) | 0x6400).to(kind, bitcast=True) - (zero + 1024.0).to(kind)
    else:
        numbers = codes.to(tl.float32) - zero
    return numbers.to(kind)


@triton.jit
def _row_sums(x, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Pair by pair, so that the order does not follow from which threads hold a row."""
    for i in tl.static_range(8):
        if TILE >> i > 1:
            x = tl.sum(tl.reshape(x.to(tl.float32), [ROWS, TILE >> (i + 1), 2]), 2)
    return tl.reshape(x, [ROWS])


@triton.jit(do_not_specialize=["m"])
def _quantised_kernel(
    x, x_scales, codes, scales, zeros, minimums, bias, y, partials, arrived, order, starts, ends, permuted,
    m, stride_x, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPED: tl.constexpr, STAGES: tl.constexpr, ROUNDED: tl.constexpr, FLOAT4: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """One program a tile of y, or a range of K of one; of ``EXPERTS``, a tile of one expert's rows."""
    PARTS: tl.constexpr = 8 // BITS
    STEP: tl.constexpr = TILE * PARTS
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    kind: tl.constexpr = x.dtype.element_ty
    sums: tl.constexpr = tl.int32 if ROUNDED else tl.float32
    total_kind: tl.constexpr = tl.int32 if ROUNDED and GROUP == 0 else tl.float32
    if order is None:
        tile_m, tile_n = tile_at(tl.program_id(0), tl.cdiv(m, ROWS), tl.cdiv(N, COLUMNS), GROUPED)
        rows = tile_m * ROWS + tl.arange(0, ROWS)
        real = rows < m
        sources = (rows % m).to(tl.int64)  # rows past the end are others anew, and not stored
        to = rows.to(tl.int64)
        expert = 0
    else:
        tile_n = tl.program_id(0) % tl.cdiv(N, COLUMNS)
        tile = tl.program_id(0) // tl.cdiv(N, COLUMNS)
        if tile >= tl.load(ends + EXPERTS - 1):
            return
        expert, real, sources, to = rows_of_tile(
            tile, order, starts, ends, EXPERTS, PADDED, CHOSEN, SORTED, ROWS
        )
    columns = tile_n * COLUMNS + tl.arange(0, COLUMNS)
    own = expert * N + columns % N
    k = tl.arange(0, TILE)
    row_x = x + sources[:, None] * stride_x
    at_x = row_x + k[None, :]
    at_codes = codes + own.to(tl.int64)[:, None] * (STEPS * TILE) + k[None, :]
    first = tl.program_id(1) * PER_SPLIT
    acc = tl.zeros([COLUMNS, ROWS], total_kind)
    for step in tl.range(first, tl.minimum(first + PER_SPLIT, STEPS), num_stages=STAGES):
        held = tl.load(at_codes + step * TILE)
        part = tl.zeros([COLUMNS, ROWS], sums)
        for half in tl.static_range(PARTS):
            start = step * STEP + half * TILE
            group = start // GROUP if GROUP else 0
            if permuted is not None:
                inside = start + k < K
                k_of_x = tl.load(permuted + expert * K + start + k, mask=inside, other=0)
                inputs = tl.load(row_x + k_of_x[None, :], mask=inside[None, :], other=0.0)
            elif K % STEP == 0:
                inputs = tl.load(at_x + start)
            else:
                inputs = tl.load(at_x + start, mask=(start + k < K)[None, :], other=0.0)
            if zeros is not None:
                zero = tl.load(zeros + group * (EXPERTS * N) + own).to(tl.float32)[:, None]
            else:
                zero = tl.full([1, 1], 8.0, tl.float32) if BITS == 4 else None
            weights = _number((held >> (4 * half)) & 15 if BITS == 4 else held, zero, kind, BITS, FLOAT4)
            if GROUP == 0:
                acc = tl.dot(weights, tl.trans(inputs), acc, input_precision="ieee", out_dtype=sums)
            else:
                part = tl.dot(weights, tl.trans(inputs), part, input_precision="ieee", out_dtype=sums)
                if minimums is not None:
                    minimum = tl.load(minimums + group * (EXPERTS * N) + own).to(tl.float32)
                    acc = tl.fma(_row_sums(inputs, ROWS, TILE)[None, :], -minimum[:, None], acc)
                if GROUP < STEP or half == PARTS - 1:
                    scale = tl.load(scales + group * (EXPERTS * N) + own).to(tl.float32)
                    acc = tl.fma(part.to(tl.float32), scale[:, None], acc)
                    part = tl.zeros([COLUMNS, ROWS], sums)
    if SPLITS > 1:
        within = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        held_at = partials + tl.program_id(0).to(tl.int64) * (SPLITS * COLUMNS * ROWS) + within
        tl.store(held_at + tl.program_id(1) * (COLUMNS * ROWS), acc)
        tl.debug_barrier()  # all threads' stores come before the one that counts them
        if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived + tl.program_id(0), 0)
        acc = tl.zeros([COLUMNS, ROWS], total_kind)
        for split in range(SPLITS):
            acc += tl.load(held_at + split * (COLUMNS * ROWS), cache_modifier=".cg")
    total = acc.to(tl.float32)
    if GROUP == 0:
        total = total * tl.load(scales + own).to(tl.float32)[:, None]
    if ROUNDED:
        total = total * tl.load(x_scales + sources)[None, :]
    if bias is not None:
        total += tl.load(bias + own).to(tl.float32)[:, None]
    at = y + to[:, None] * N + columns[None, :]
    inside = real[:, None] & (columns < N)[None, :]
    tl.store(at, tl.trans(total).to(y.dtype.element_ty), mask=inside)
