"""The least score that min-p, top-k and top-p leave of each row, by one program a row.

    x = score / temperature;  M = max(x)
    min-p  x >= M + log(min_p)
    top-k  the highest t such that k scores are at least t
    top-p  the highest t such that the weights exp(x - M) of the scores from t on hold top_p of all
           that are left

Division keeps the order of scores, so t is looked for among the scores themselves, and only the answer is
divided. A round compares each score with eight pivots at once; each of LANES lanes adds up weights and counts
of its own, which are summed after the last score. Rounds over the whole row narrow the interval that holds t
until at most KEPT scores are in it; these are copied out, in an order fixed by their lanes, and the other
rounds read them from the first-level cache. The first pivots lie at distances from the maximum in a geometric
row, and so suit peaked and flat rows of any scale; those from the fourth round on halve the integers that
floats are ordered by (without the zeros at their ends, of which scores that were bfloat16 have sixteen), so
that the search always ends. No row looks at another, and all sums have one order.

Bytes: 4 a score and pass over the row: one for the maximum, one for copying, and one or two rounds. Estimated
for an H100 from the instructions a score of each loop (45 in a round) and from its bandwidth, by
``bench/kernels/threshold_estimate.py``; never measured: 0.06 to 0.1 ms for one row of 151,936 scores, 0.09 to
0.13 ms for 132 rows. Rows of a few distinct scores that tie thousands of times take more rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling_noise import log

LANES = 512
KEPT = 16384  # scores that are copied out at most


def thresholds(scores: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """float32 [n]: the least score over temperature that stays, of scores float32 [n, vocab_size]. -inf: all
    stay, as they do at temperature 0."""
    n, vocab_size = scores.shape
    found = torch.empty(n, dtype=torch.float32, device=scores.device)
    kept = torch.empty((n, KEPT), dtype=torch.float32, device=scores.device)
    lanes = min(LANES, triton.next_power_of_2(vocab_size))
    _threshold_kernel[(n,)](
        scores, temperatures, top_k, top_p, min_p, found, kept, scores.stride(0),
        VOCAB_SIZE=vocab_size, LANES=lanes, KEPT=KEPT, num_warps=max(1, lanes // 32),
    )  # fmt: skip
    return found


@triton.jit
def _key(x):
    """int32 in the order of the float32 that they are made of; both zeros are 0."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    return tl.where(bits < 0, -size, size)


@triton.jit
def _score(key):
    """The float32 of a key."""
    key = key.to(tl.int32)
    return tl.where(key < 0, -key | -2147483648, key).to(tl.float32, bitcast=True)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _extremes(scores, VOCAB_SIZE: tl.constexpr, LANES: tl.constexpr):
    """The highest score, the lowest that is not -inf (none: the highest), and how many bits all keys have at
    their ends that are zeros: 16 where scores were bfloat16 once."""
    lane = tl.arange(0, LANES)
    highest = tl.full([LANES], float("-inf"), tl.float32)
    lowest = tl.full([LANES], float("inf"), tl.float32)
    bits = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, VOCAB_SIZE, LANES, loop_unroll_factor=8):
        score = tl.load(scores + start + lane, mask=start + lane < VOCAB_SIZE, other=float("-inf"))
        highest = tl.maximum(highest, score)
        lowest = tl.minimum(lowest, tl.where(score == float("-inf"), float("inf"), score))
        bits |= score.to(tl.int32, bitcast=True)
    top = tl.max(highest, 0)
    used = tl.reduce(bits, 0, _either) & 0x7FFFFFFF
    last_bit = (used & -used).to(tl.float32)  # a power of two: its exponent is the number of zeros
    num_zeros = tl.maximum((last_bit.to(tl.int32, bitcast=True) >> 23) - 127, 0)
    return top, tl.minimum(tl.min(lowest, 0), top), num_zeros


@triton.jit
def _least_kept(floor, temperature):
    """The key of the least score that divided by ``temperature`` is at least ``floor``: the product is off by
    a few last bits."""
    guess = _key(floor * temperature).to(tl.int64)
    keys = guess + tl.arange(0, 16) - 8
    return tl.min(tl.where(tl.div_rn(_score(keys), temperature) >= floor, keys, guess + 8), 0)


@triton.jit
def _pivots(low, high, rounds, num_zeros):
    """Eight keys (without their last zeros) of [low, high), ascending, the first of them ``low``."""
    i = tl.arange(0, 8)
    even = low + (high - low) * i // 8
    part = tl.where(rounds == 0, tl.exp2(-0.72 * i), 1.0 - 0.125 * i)
    by_value = (
        _key(_score(low << num_zeros) * part + _score(high - 1 << num_zeros) * (1.0 - part)).to(tl.int64)
        >> num_zeros
    )
    by_value = tl.minimum(tl.maximum(by_value, low), high - 1)
    return tl.where(i == 0, low, tl.where(rounds < 3, by_value, even))


@triton.jit
def _from_pivots(scores, num_scores, bounds, highest, scale, LANES: tl.constexpr):
    """Weights and number of the scores from each bound on, by lane: [8, LANES]."""
    lane = tl.arange(0, LANES)
    masses = tl.zeros([8, LANES], tl.float32)
    counts = tl.zeros([8, LANES], tl.int32)
    for start in tl.range(0, num_scores, LANES, loop_unroll_factor=8):
        score = tl.load(scores + start + lane, mask=start + lane < num_scores, other=float("-inf"))
        weight = tl.exp2((score - highest) * scale)
        above = score[None, :] >= bounds[:, None]
        masses += tl.where(above, weight[None, :], 0.0)
        counts += above.to(tl.int32)
    return masses, counts


@triton.jit
def _entry(values, index):
    """One of eight values; 0 where there is none of that index."""
    return tl.sum(tl.where(tl.arange(0, 8) == index, values, 0), 0)


@triton.jit
def _lane_entry(values, index):
    return tl.sum(tl.where(tl.arange(0, 8)[:, None] == index, values, 0), 0)


@triton.jit
def _copy_out(scores, kept, low, last, counts, VOCAB_SIZE: tl.constexpr, LANES: tl.constexpr):
    """Write the scores from ``low`` to ``last`` one lane behind the other; ``counts`` [LANES] is how many
    each has."""
    lane = tl.arange(0, LANES)
    at = tl.cumsum(counts, 0) - counts
    tl.debug_barrier()  # what was copied before may still be read
    for start in tl.range(0, VOCAB_SIZE, LANES, loop_unroll_factor=8):
        score = tl.load(scores + start + lane, mask=start + lane < VOCAB_SIZE, other=float("-inf"))
        inside = (start + lane < VOCAB_SIZE) & (score >= low) & (score <= last)
        tl.store(kept + at, score, mask=inside)
        at += inside.to(tl.int32)
    tl.debug_barrier()


@triton.jit
def _threshold_kernel(
    scores, temperatures, top_k, top_p, min_p, thresholds, kept, stride,
    VOCAB_SIZE: tl.constexpr, LANES: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if (temperature == 0.0) | ((least <= 0.0) & (p >= 1.0) & (k <= 0)):
        tl.store(thresholds + row, float("-inf"))
        return
    scores += row * stride
    kept += row * KEPT
    highest, lowest, num_zeros = _extremes(scores, VOCAB_SIZE, LANES)
    scale = 1.4426950408889634 / temperature
    top = (_key(highest).to(tl.int64) >> num_zeros) + 1
    low = _key(lowest).to(tl.int64) >> num_zeros
    floor = tl.full([], float("-inf"), tl.float32)
    if least > 0.0:
        floor = tl.div_rn(highest, temperature) + log(least)
        low = tl.maximum(low, tl.minimum(-(-_least_kept(floor, temperature) >> num_zeros), top - 1))
    covered = top  # from here on all scores are in ``kept``
    num_kept = 0
    num_low = 0  # scores from ``low`` on, once that is known
    for by_mass in range(2):
        if tl.where(by_mass == 1, p < 1.0, (k > 0) & (k < VOCAB_SIZE)):
            # of the tokens that tie for place k, the mass of those beyond it does not count
            excess = tl.where((by_mass == 1) & (k > 0), tl.maximum(num_low - k, 0), 0).to(tl.float32)
            excess *= tl.exp2((_score(low << num_zeros) - highest) * scale)
            high, wanted, rounds = top, k.to(tl.float32), 0
            mass_high, num_high = 0.0, 0
            if covered > low:  # narrow by rounds over the whole row
                lanes_low = tl.zeros([LANES], tl.int32)
                lanes_high = tl.zeros([LANES], tl.int32)
                while (high - low > 1) & ((rounds == 0) | (num_low - num_high > KEPT)):
                    pivots = _pivots(low, high, rounds, num_zeros)
                    masses, counts = _from_pivots(
                        scores, VOCAB_SIZE, _score(pivots << num_zeros), highest, scale, LANES
                    )
                    mass, num = tl.sum(masses, 1), tl.sum(counts, 1)
                    if (by_mass == 1) & (rounds == 0):
                        wanted = p * (_entry(mass, 0) - excess)
                    reached = tl.where(by_mass == 1, mass, num.to(tl.float32)) >= wanted
                    at = tl.maximum(tl.sum(reached.to(tl.int32), 0) - 1, 0)
                    if at < 7:
                        high = _entry(pivots, at + 1)
                        mass_high, num_high = _entry(mass, at + 1), _entry(num, at + 1)
                        lanes_high = _lane_entry(counts, at + 1)
                    low, num_low, lanes_low = _entry(pivots, at), _entry(num, at), _lane_entry(counts, at)
                    rounds += 1
                if high - low > 1:
                    num_kept = num_low - num_high
                    last = high - 1
                    covered = top
                    if num_low <= KEPT:  # then all of the highest, for the next search
                        num_kept, last, covered = num_low, top - 1, low
                        mass_high, num_high = 0.0, 0
                        lanes_high = tl.zeros([LANES], tl.int32)
                    _copy_out(
                        scores,
                        kept,
                        _score(low << num_zeros),
                        _score(last << num_zeros),
                        lanes_low - lanes_high,
                        VOCAB_SIZE,
                        LANES,
                    )
            while high - low > 1:  # rounds over the scores that were copied
                pivots = _pivots(low, high, rounds + 3, num_zeros)
                masses, counts = _from_pivots(
                    kept, num_kept, _score(pivots << num_zeros), highest, scale, LANES
                )
                mass, num = tl.sum(masses, 1) + mass_high, tl.sum(counts, 1) + num_high
                if (by_mass == 1) & (rounds == 0):
                    wanted = p * (_entry(mass, 0) - excess)
                reached = tl.where(by_mass == 1, mass, num.to(tl.float32)) >= wanted
                at = tl.maximum(tl.sum(reached.to(tl.int32), 0) - 1, 0)
                if at < 7:
                    high = _entry(pivots, at + 1)
                low, num_low = _entry(pivots, at), _entry(num, at)
                rounds += 1
    tl.store(thresholds + row, tl.maximum(floor, tl.div_rn(_score(low << num_zeros), temperature)))
