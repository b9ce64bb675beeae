"""The least score that min-p, top-k and top-p leave of each row.

    x = score / temperature;  M = max(x)
    min-p  x >= M + log(min_p)
    top-k  the highest t such that k scores are at least t
    top-p  the highest t such that the weights exp(x - M) of the scores from t on hold top_p of all
           that are left

Division keeps the order of scores, so t is looked for among the scores themselves. SLICES programs share a
row in three passes over it:

    survey   maximum, minimum and mass of each slice
    sums     mass, or with top-k the number, of the scores from each of PIVOTS pivots on. No top-p threshold
             lies further than log(scores / mass / (1 - top_p)) below the maximum: pivots divide that range
             evenly. With top-k they lie in geometric rows on both sides of the least of the slices' maxima.
    copy     the scores between the two pivots that hold t; with top-k, all from the lower one on

Then one program a row narrows the interval among the scores that were copied, eight pivots a round. No row
looks at another, and all sums have one order. Bytes: 12 a score and filtered row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling_noise import log

SLICES = 32  # programs a row
LANES = 512  # scores that a program takes at once
PIVOTS = 16
NARROW_LANES, NARROW_WARPS = 512, 16


def thresholds(scores: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """float32 [n]: the least score that stays, of scores float32 [n, vocab_size]. -inf: all stay, as they do
    at temperature 0."""
    n, vocab_size = scores.shape
    slices = min(SLICES, triton.next_power_of_2(triton.cdiv(vocab_size, LANES)))
    size = triton.cdiv(vocab_size, slices * LANES) * LANES  # of a slice

    def floats(*shape: int) -> Tensor:
        return torch.empty((n, *shape), dtype=torch.float32, device=scores.device)

    rows = (scores, temperatures, top_k, top_p, min_p)
    stats, sums, pivots = floats(3, slices), floats(slices, PIVOTS), floats(PIVOTS)
    kept, counts, bounds, found = floats(slices * size), floats(slices), floats(4), floats()
    shape = {"VOCAB_SIZE": vocab_size, "SIZE": size, "SLICES": slices, "PIVOTS": PIVOTS}
    grid, stride = (n, slices), scores.stride(0)
    _survey_kernel[grid](*rows, stats, stride, **shape, LANES=LANES)
    _sums_kernel[grid](*rows, stats, pivots, sums, stride, **shape, LANES=LANES)
    _copy_kernel[grid](*rows, stats, pivots, sums, bounds, kept, counts, stride, **shape, LANES=LANES)
    _narrow_kernel[(n,)](
        *rows, stats, bounds, kept, counts, found, **shape, LANES=NARROW_LANES, num_warps=NARROW_WARPS
    )
    return found


@triton.jit
def _key(x):
    """int64 in the order of the float32 that they are made of; both zeros are 0."""
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.int64)
    return tl.where(bits < 0, -size, size)


@triton.jit
def _score(key):
    """The float32 of a key."""
    key = key.to(tl.int32)
    return tl.where(key < 0, -key | -2147483648, key).to(tl.float32, bitcast=True)


@triton.jit
def _least_score(floor, temperature):
    """The least float32 that divided by ``temperature`` is at least ``floor``."""
    low, high = _key(floor) * 0 - 0x7F800000, _key(floor) * 0 + 0x7F800000
    for _ in range(7):
        keys = low + (high - low) * (tl.arange(0, 32) + 1) // 32
        enough = tl.div_rn(_score(keys), temperature) >= floor
        low, high = tl.max(tl.where(enough, low, keys), 0), tl.min(tl.where(enough, keys, high), 0)
    return _score(high)


@triton.jit
def _asks(row, temperatures, top_k, top_p, VOCAB_SIZE: tl.constexpr):
    """temperature; k, 0: all; p; whether a threshold is to be searched."""
    temperature, k, p = tl.load(temperatures + row), tl.load(top_k + row), tl.load(top_p + row)
    k = tl.where(k < VOCAB_SIZE, tl.maximum(k, 0), 0)
    return temperature, k, p, (temperature > 0.0) & ((p < 1.0) | (k > 0))


@triton.jit
def _floor(top, temperature, least):
    """What min-p leaves: the least of scores over temperature."""
    return tl.where(least > 0.0, tl.div_rn(top, temperature) + log(least), float("-inf"))


@triton.jit
def _survey_kernel(
    scores, temperatures, top_k, top_p, min_p, stats, stride, VOCAB_SIZE: tl.constexpr,
    SIZE: tl.constexpr, SLICES: tl.constexpr, PIVOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """``stats`` of a slice: the highest score, the lowest but -inf, the sum of weights beside the highest."""
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _, _, searched = _asks(row, temperatures, top_k, top_p, VOCAB_SIZE)
    if (not searched) & ((temperature <= 0.0) | (tl.load(min_p + row) <= 0.0)):
        return
    scale = 1.4426950408889634 / temperature
    end = tl.minimum((slice + 1) * SIZE, VOCAB_SIZE)
    highest = tl.full([2 * LANES], -3.4028234663852886e38, tl.float32)
    lowest = tl.full([2 * LANES], float("inf"), tl.float32)
    mass = tl.zeros([2 * LANES], tl.float32)
    for start in range(slice * SIZE, end, 2 * LANES):
        at = start + tl.arange(0, 2 * LANES)
        score = tl.load(scores + row * stride + at, mask=at < end, other=float("-inf"))
        lowest = tl.minimum(lowest, tl.where(score == float("-inf"), float("inf"), score))
        higher = tl.maximum(highest, score)
        mass = mass * tl.exp2((highest - higher) * scale) + tl.exp2((score - higher) * scale)
        highest = higher
    top = tl.max(highest, 0)
    stats += row * 3 * SLICES + slice
    tl.store(stats, top)
    tl.store(stats + SLICES, tl.min(lowest, 0))
    tl.store(stats + 2 * SLICES, tl.sum(mass * tl.exp2((highest - top) * scale), 0))


@triton.jit
def _sums_kernel(
    scores, temperatures, top_k, top_p, min_p, stats, pivots, sums, stride, VOCAB_SIZE: tl.constexpr,
    SIZE: tl.constexpr, SLICES: tl.constexpr, PIVOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, k, p, searched = _asks(row, temperatures, top_k, top_p, VOCAB_SIZE)
    if not searched:
        return
    scale = 1.4426950408889634 / temperature
    stats += row * 3 * SLICES + tl.arange(0, SLICES)
    maxima = tl.load(stats)
    top = tl.max(maxima, 0)
    lowest = tl.minimum(tl.min(tl.load(stats + SLICES), 0), top)
    mass = tl.sum(tl.load(stats + 2 * SLICES) * tl.exp2((maxima - top) * scale), 0)
    least = tl.load(min_p + row)
    if least > 0.0:
        least = _least_score(_floor(top, temperature, least), temperature)
        lowest, mass = tl.maximum(lowest, tl.minimum(least, top)), 1.0
    i = tl.arange(0, PIVOTS)
    if k > 0:
        near = tl.min(tl.where(maxima >= lowest, maxima, top), 0)
        part = tl.exp2(-0.72 * tl.minimum(i, PIVOTS - 1 - i))
        pivot = near * (1.0 - part) + tl.where(i < PIVOTS // 2, lowest, top) * part
    else:
        near = top - temperature * (tl.log(VOCAB_SIZE / (mass * (1.0 - p))) + 0.05)
        part = (i - 1) / (PIVOTS - 2.0)
        pivot = tl.maximum(near, lowest) * (1.0 - part) + top * part
    pivot = tl.minimum(tl.maximum(pivot, lowest), top)
    pivot = tl.where(i == 0, lowest, tl.where(i == PIVOTS - 1, top, pivot))
    stop = tl.minimum((slice + 1) * SIZE, VOCAB_SIZE)
    total = tl.zeros([PIVOTS, LANES], tl.float32)
    at = slice * SIZE + tl.arange(0, LANES)
    score = tl.load(scores + row * stride + at, mask=at < stop, other=float("-inf"))
    for _ in range(slice * SIZE, stop, LANES):
        at += LANES
        ahead = tl.load(scores + row * stride + at, mask=at < stop, other=float("-inf"))
        weight = tl.where(k > 0, 1.0, tl.exp2((score - top) * scale))
        total = tl.where(score[None, :] >= pivot[:, None], total + weight[None, :], total)
        score = ahead
    tl.store(sums + (row * SLICES + slice) * PIVOTS + i, tl.sum(total, 1))
    if slice == 0:
        tl.store(pivots + row * PIVOTS + i, pivot)


@triton.jit
def _copy_kernel(
    scores, temperatures, top_k, top_p, min_p, stats, pivots, sums, bounds, kept, counts, stride,
    VOCAB_SIZE: tl.constexpr, SIZE: tl.constexpr, SLICES: tl.constexpr, PIVOTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Also ``bounds``: the least score copied, the least of those above, their sum, and the sum wanted."""
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, k, p, searched = _asks(row, temperatures, top_k, top_p, VOCAB_SIZE)
    if not searched:
        return
    i = tl.arange(0, PIVOTS)
    pivot = tl.load(pivots + row * PIVOTS + i)
    by_slice = sums + row * SLICES * PIVOTS + tl.arange(0, SLICES)[:, None] * PIVOTS + i[None, :]
    total = tl.sum(tl.load(by_slice), 0)
    wanted = tl.where(k > 0, k.to(tl.float32), p * tl.max(total, 0))
    reached = total >= wanted
    low = tl.max(tl.where(reached | (i == 0), pivot, float("-inf")), 0)
    high = tl.min(tl.where(reached | (k > 0), float("inf"), pivot), 0)
    above = tl.max(tl.where(reached | (k > 0), 0.0, total), 0)
    if slice == 0:
        which = tl.arange(0, 4)
        bound = tl.where(which == 0, low, tl.where(which == 1, high, tl.where(which == 2, above, wanted)))
        tl.store(bounds + row * 4 + which, bound)
    num = tl.zeros([], tl.int32)
    stop = tl.minimum((slice + 1) * SIZE, VOCAB_SIZE)
    if tl.load(stats + row * 3 * SLICES + slice) >= low:
        kept += (row * SLICES + slice) * SIZE
        lanes = tl.arange(0, 4)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        for start in range(slice * SIZE, stop, 4 * LANES):
            at = start + lanes
            score = tl.load(scores + row * stride + at, mask=at < stop, other=float("-inf"))
            inside = ((score >= low) & (score < high)).to(tl.int32)
            in_lane = tl.sum(inside, 0)
            up_to_lane = tl.cumsum(in_lane, 0)
            place = num + (up_to_lane - in_lane)[None, :] + tl.cumsum(inside, 0) - 1
            tl.store(kept + place, score, mask=inside > 0)
            num += tl.max(up_to_lane, 0)
    tl.store(counts + row * SLICES + slice, num.to(tl.float32))


@triton.jit
def _narrow_kernel(
    scores, temperatures, top_k, top_p, min_p, stats, bounds, kept, counts, thresholds,
    VOCAB_SIZE: tl.constexpr, SIZE: tl.constexpr, SLICES: tl.constexpr, PIVOTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, k, p, searched = _asks(row, temperatures, top_k, top_p, VOCAB_SIZE)
    least = tl.load(min_p + row)
    if (not searched) & ((temperature <= 0.0) | (least <= 0.0)):
        tl.store(thresholds + row, float("-inf"))
        return
    top = tl.max(tl.load(stats + row * 3 * SLICES + tl.arange(0, SLICES)), 0)
    floor = _floor(top, temperature, least)
    if searched:
        scale = 1.4426950408889634 / temperature
        bounds += row * 4
        above, wanted = tl.load(bounds + 2), tl.load(bounds + 3)
        low, last = _key(tl.load(bounds)), tl.minimum(_key(tl.load(bounds + 1)) - 1, _key(top))
        lane = tl.arange(0, LANES)
        slice, WIDTH = lane // (LANES // SLICES), LANES // SLICES
        count = tl.load(counts + row * SLICES + slice).to(tl.int32)
        longest = tl.max(count, 0)
        copied = kept + (row * SLICES + slice) * SIZE
        i = tl.arange(0, 8)
        excess = tl.full([], 0.0, tl.float32)
        for by_mass in range(2):
            if tl.where(by_mass == 1, p < 1.0, k > 0):
                rounds, num = 0, 0.0
                while (rounds == 0) | (low < last):
                    part = i / 7.0
                    keys = _key(_score(low) * (1.0 - part) + _score(last) * part)
                    keys = tl.where((rounds < 4) & (i > 0) & (i < 7), keys, low + (last - low) * i // 7)
                    keys = tl.minimum(tl.maximum(keys, low), last)
                    pivot, first, final = _score(keys), _score(low), _score(last)
                    total = tl.zeros([8, LANES], tl.float32)
                    lowest = tl.full([LANES], float("inf"), tl.float32)
                    highest = tl.full([LANES], float("-inf"), tl.float32)
                    for start in tl.range(0, longest, WIDTH, loop_unroll_factor=4):
                        at = start + lane % WIDTH
                        score = tl.load(copied + at, mask=at < count, other=float("-inf"))
                        weight = tl.where(by_mass == 1, tl.exp2((score - top) * scale), 1.0)
                        total = tl.where(score[None, :] >= pivot[:, None], total + weight[None, :], total)
                        inside = (score >= first) & (score <= final)
                        lowest = tl.minimum(lowest, tl.where(inside, score, float("inf")))
                        highest = tl.maximum(highest, tl.where(inside, score, float("-inf")))
                    sums = tl.sum(total, 1) + above
                    most = tl.max(sums, 0)
                    if (by_mass == 1) & (k > 0) & (rounds == 0):
                        wanted = p * (most - excess)
                    reached = sums >= wanted
                    num = tl.min(tl.where(reached, sums, most), 0)
                    low = tl.max(tl.where(reached, keys, low), 0)
                    last = tl.maximum(tl.min(tl.where(reached, last, keys - 1), 0), low)
                    last = tl.minimum(last, _key(tl.max(highest, 0)))
                    low = tl.minimum(tl.maximum(low, _key(tl.min(lowest, 0))), last)
                    rounds += 1
                # of the scores that tie for place k, the mass of those beyond it does not count
                excess = tl.maximum(num - k, 0.0) * tl.exp2((_score(low) - top) * scale)
                last = _key(top)
        floor = tl.maximum(floor, tl.div_rn(_score(low), temperature))
    tl.store(thresholds + row, _least_score(floor, temperature))
