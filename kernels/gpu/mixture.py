"""A mixture of experts: routes, one product over all experts' rows, the weighted sum.

    y = sum over a token's experts of weight * down(act(gate) * up)

Bytes: the weights of the experts that are chosen, once for each tile of their rows; FLOPs: 6 hidden_size
intermediate_size a token and expert.

The host knows nothing but the number of tokens, so a graph can hold all of it. A stable sort brings each
expert's tokens together; a tile is ``rows`` of one expert, and as many programs are launched as there could
be tiles: those past the last one end at once. Rows of experts that are not held come last, and have no tile.
A row is summed by one program over all of K in order, and a token's experts are added in the order of their
numbers: its bits depend on no other token, in any batch.
"""

from __future__ import annotations

import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Linear, joined
from ..mixture_shape import MixtureShape, num_inputs
from ..mixture_weights import MixtureWeights
from ..quantised import QuantisedWeight
from .elementwise import gate_mul
from .exact_linear import BLOCK_K, ProductTile, product, product_tile
from .expert_tiles import ExpertTiles, plan_tiles, rows_of_tile
from .quantised_experts import QuantisedExperts
from .quantised_linear import quantised_tile

logger = logging.getLogger(__name__)
COLUMNS = 1024  # of one program of the sum


class GpuMixture:
    """See ``mixture_weights.Mixture``. ``router`` and ``shared`` are linears as the kernels make them: the
    latter the gate above up, and down, of the expert of all tokens."""

    def __init__(self, weights: MixtureWeights, router: Linear, shared: tuple[Linear, Linear] | None) -> None:
        self._shape, shape = weights.shape, weights.shape
        self._router, self._shared, self._correction = router, shared, weights.correction
        self._gate_up_biases, self._down_biases = weights.gate_up_biases, weights.down_biases
        held, hidden, size = shape.held, shape.hidden_size, shape.intermediate_size
        self._gate_up: Tensor | QuantisedExperts
        self._down: Tensor | QuantisedExperts
        expert_of = weights.expert
        if isinstance(expert_of(held.start).down, QuantisedWeight):
            experts = {i: expert_of(i) for i in held}
            gate_up = QuantisedExperts.of([of.gate_up for of in experts.values()], weights.gate_up_biases)
            down = QuantisedExperts.of([of.down for of in experts.values()], weights.down_biases)
            if gate_up is not None and down is not None:
                self._gate_up, self._down = gate_up, down
                return
            logger.warning("kernels: experts in several forms are dequantised: they take the model's type")
            expert_of = experts.__getitem__
        columns = num_inputs(shape.activation) * size
        self._gate_up = weights.router.new_empty((len(held), columns, hidden))
        self._down = weights.router.new_empty((len(held), hidden, size))
        for place, i in enumerate(held):
            expert = expert_of(i)
            self._gate_up[place] = joined(expert.gate_up)
            self._down[place] = joined(expert.down)

    def __call__(self, x: Tensor) -> Tensor:
        shape, logits = self._shape, self._router(x)
        experts, weights = route(logits, shape, self._correction)
        quantised, rows = isinstance(self._down, QuantisedExperts), experts.numel()
        tile = quantised_tile(rows, experts=True) if quantised else product_tile(rows)
        tiles = plan_tiles(experts, len(shape.held), tile.rows)
        chosen, num_rows = shape.num_chosen, None if shape.own is None else tiles.num_rows
        gate_up = grouped_product(
            x, self._gate_up, self._gate_up_biases, tiles, tile, chosen, sorted_rows=False
        )
        activated = gate_mul(gate_up, shape.activation, num_rows)
        parts = grouped_product(
            activated, self._down, self._down_biases, tiles, tile, chosen, sorted_rows=True
        )
        shared = None
        if self._shared is not None:
            shared = self._shared[1](gate_mul(self._shared[0](x), shape.activation))
        held = None if shape.own is None else (experts, len(shape.own))
        return weighted_sum(parts, weights, shared, logits, shape.shared_gated, held)


def route(logits: Tensor, shape: MixtureShape, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each token's experts, ascending, int32 [num_tokens, num_chosen], and their weights, float32: see
    ``reference.routes``. They are numbered from the first one held on, those before it behind all others.
    Columns of ``logits`` past num_experts are not looked at."""
    rows = len(logits)
    experts = torch.empty((rows, shape.num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, shape.num_chosen), dtype=torch.float32, device=logits.device)
    _route_kernel[(rows,)](
        logits, correction, experts, weights, logits.stride(0), EXPERTS=shape.num_experts,
        PADDED=max(2, triton.next_power_of_2(shape.num_experts)), CHOSEN=shape.num_chosen,
        NORMALIZED=shape.normalized, SIGMOID=shape.sigmoid, GROUPS=shape.num_groups,
        CHOSEN_GROUPS=shape.chosen_groups, FACTOR=shape.factor, FIRST=shape.held.start, num_warps=1,
    )  # fmt: skip
    return experts, weights


def grouped_product(
    x: Tensor,
    weights: Tensor | QuantisedExperts,
    biases: Tensor | None,
    tiles: ExpertTiles,
    tile: ProductTile,
    chosen: int,
    sorted_rows: bool,
) -> Tensor:
    """x W^T + bias of each row's expert, weights [num_experts, n, k].

    ``sorted_rows``: x has the rows of ``tiles.order``, and the result is in the order of tokens; otherwise x
    has the tokens, and the result the rows of ``tiles.order``."""
    if isinstance(weights, QuantisedExperts):
        return weights(x, tiles, tile, chosen, sorted_rows)
    num_experts, n, k = weights.shape
    assert x.stride() == (k, 1)
    y = torch.empty((len(tiles.order), n), dtype=x.dtype, device=x.device)
    _grouped_kernel[(tiles.most(tile.rows) * triton.cdiv(n, tile.columns),)](
        x, weights, biases, y, tiles.order, tiles.starts, tiles.ends, EXPERTS=num_experts,
        PADDED=max(2, triton.next_power_of_2(num_experts)), CHOSEN=chosen, SORTED=sorted_rows, N=n, K=k,
        ROWS=tile.rows, COLUMNS=tile.columns, BLOCK_K=BLOCK_K, STAGES=tile.stages, BIAS=biases is not None,
        num_warps=tile.warps,
    )  # fmt: skip
    return y


def weighted_sum(
    parts: Tensor, weights: Tensor, shared: Tensor | None, logits: Tensor, gated: bool = True,
    held: tuple[Tensor, int] | None = None,
) -> Tensor:  # fmt: skip
    """parts [num_tokens * num_chosen, hidden_size], weights [num_tokens, num_chosen]; ``shared``
    [num_tokens, hidden_size] has the weight sigmoid(the last column of ``logits``), or 1 if not ``gated``.
    ``held``: each part's expert, and from which number on they are not held: their parts are not read."""
    experts, num_held = held or (None, 0)
    (rows, chosen), hidden = weights.shape, parts.shape[1]
    out = torch.empty((rows, hidden), dtype=parts.dtype, device=parts.device)
    _sum_kernel[(rows, triton.cdiv(hidden, COLUMNS))](
        parts, weights, experts, shared, logits, out, logits.stride(0), logits.shape[1] - 1, CHOSEN=chosen,
        HELD=num_held, N=hidden, SHARED=shared is not None, GATED=gated,
        COLUMNS=min(COLUMNS, triton.next_power_of_2(hidden)), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _route_kernel(
    logits, correction, experts, weights, stride, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, FACTOR: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One program a token. Of equal scores, the lower number is chosen, of experts as of groups."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, PADDED)
    real = numbers < EXPERTS
    values = tl.load(logits + row * stride + numbers, mask=real, other=float("-inf")).to(tl.float32)
    scores = tl.where(real, tl.sigmoid(values), float("-inf")) if SIGMOID else values
    if correction is not None and not SIGMOID:
        scores = tl.exp(values - tl.max(values, 0))
        scores = tl.where(real, scores / tl.sum(scores, 0), float("-inf"))
    left = scores
    if correction is not None:
        left += tl.load(correction + numbers, mask=real, other=0.0)
    if GROUPS > 1:
        left = tl.where(
            _in_chosen_groups(left, numbers, correction is not None, EXPERTS, GROUPS, CHOSEN_GROUPS),
            left, float("-inf"),
        )  # fmt: skip
    chosen = numbers < 0
    for _ in range(CHOSEN):
        highest = tl.max(tl.where(chosen, float("-inf"), left), 0)
        best = tl.min(tl.where((left == highest) & real & (chosen == 0), numbers, EXPERTS - 1), 0)
        chosen = chosen | (numbers == best)
    if SIGMOID or correction is not None:
        parts = scores
        total = tl.sum(tl.where(chosen, parts, 0.0), 0) if NORMALIZED else 1.0
    else:
        parts = tl.exp(values - tl.max(values, 0))
        total = tl.sum(tl.where(chosen, parts, 0.0), 0) if NORMALIZED else tl.sum(parts, 0)
    place = row * CHOSEN + tl.cumsum(chosen.to(tl.int32), 0) - 1
    numbered = tl.where(numbers < FIRST, numbers + EXPERTS, numbers) - FIRST
    tl.store(experts + place, numbered, mask=chosen)
    tl.store(weights + place, parts / total * FACTOR, mask=chosen)


@triton.jit
def _in_chosen_groups(
    scores, numbers, OF_TWO: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
):  # fmt: skip
    """Experts of the ``CHOSEN`` groups whose largest score, or sum of the largest two, is largest."""
    group = numbers // (EXPERTS // GROUPS)
    best = tl.full(numbers.shape, float("-inf"), tl.float32)  # of each expert's own group
    for i in tl.static_range(GROUPS):
        own = tl.where(group == i, scores, float("-inf"))
        first = tl.max(own, 0)
        if OF_TWO:
            place = tl.min(tl.where(own == first, numbers, EXPERTS), 0)
            first += tl.max(tl.where(numbers == place, float("-inf"), own), 0)
        best = tl.where(group == i, first, best)
    kept = numbers < 0
    for _ in tl.static_range(CHOSEN):
        highest = tl.max(tl.where(kept, float("-inf"), best), 0)
        place = tl.min(tl.where((best == highest) & (kept == 0), group, GROUPS), 0)
        kept = kept | (group == place)
    return kept & (numbers < EXPERTS)


@triton.jit
def _grouped_kernel(
    x, weights, biases, y, order, starts, ends, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    CHOSEN: tl.constexpr, SORTED: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program a tile of rows and of columns; programs that follow each other share rows."""
    tiles_n: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // tiles_n
    if tile >= tl.load(ends + EXPERTS - 1):
        return
    expert, real, sources, to = rows_of_tile(tile, order, starts, ends, EXPERTS, PADDED, CHOSEN, SORTED, ROWS)
    columns = (tl.program_id(0) % tiles_n) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    a = x + sources[:, None] * K + k[None, :]
    b = weights + (expert.to(tl.int64) * N + columns % N)[:, None] * K + k[None, :]
    acc = product(a, b, K, ROWS, COLUMNS, BLOCK_K, STAGES)
    if BIAS:
        acc += tl.load(biases + expert * N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    at = y + to[:, None] * N + columns[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=real[:, None] & (columns < N)[None, :])


@triton.jit
def _sum_kernel(
    parts, weights, experts, shared, logits, out, stride, gate, CHOSEN: tl.constexpr, HELD: tl.constexpr,
    N: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < N
    total = tl.zeros([COLUMNS], tl.float32)
    for i in range(CHOSEN):
        weight = tl.load(weights + row * CHOSEN + i)
        there = real
        if experts is not None:
            there = real & (tl.load(experts + row * CHOSEN + i) < HELD)
        part = tl.load(parts + (row * CHOSEN + i) * N + columns, mask=there, other=0.0).to(tl.float32)
        total = tl.fma(part, weight, total)
    if SHARED:
        weight = tl.sigmoid(tl.load(logits + row * stride + gate).to(tl.float32)) if GATED else 1.0
        part = tl.load(shared + row * N + columns, mask=real, other=0.0).to(tl.float32)
        total = tl.fma(part, weight, total)
    tl.store(out + row * N + columns, total.to(out.dtype.element_ty), mask=real)
