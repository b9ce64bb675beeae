"""One token a row from its logits, on the device: edits, penalties, temperature, min-p, top-k, top-p, noise,
logprobs.

In the order and with the meaning of ``engine/sampling/sampler.py``:

    x = logit + bias (-inf while the token is banned);
    seen tokens: x / r where x > 0, x * r elsewhere (repetition penalty r);
    generated tokens: x -= presence + frequency * count;  x /= temperature (0: argmax x, and that is all)
    keep x >= max(x) + log(min_p);  of these the top_k largest;
    of these the fewest that hold top_p of their mass; ties stay
    token = argmax of the kept x + noise(seed, position, token);
    logprob = logit[token] - logsumexp(logits), of the logits as they came

No row looks at another, and all sums have one order. Bytes: 4 a logit for a plain batch, 8 more where a row
has penalties or edits. A row with top-k or top-p is read some 16 times by one program, from the cache: its
threshold is found by search over the bits of a float, four intervals at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gumbel_argmax import SLICE, best_token
from .sampling_noise import gumbel_noise, log

IN_PROMPT = 1 << 30  # in a word of ``token_counts``, beside the number of times that the token was generated
THRESHOLD_TILE = 8192


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to sample each of n rows; tensors on the logits' device.

    hashed_seeds int64 [n]   splitmix(seed): see gumbel_noise.py positions    int32 [n]   of the tokens to be
    sampled temperatures, top_p, min_p, repetition, presence, frequency float32 [n]; top_k int32 [n] (0: all)
    count_slots  int32 [n]   row of ``token_counts``; -1: no penalties token_counts int32 [any, vocab_size]
    the tokens generated are added to it here edit_start   int32 [n + 1]            which of the edits are a
    row's edit_tokens, edit_banned_until int32, edit_bias float32 [any]   a token may be edited once; banned
    while position < banned_until edited, filtered   whether any row has penalties or edits; min_p, top_k or
    top_p
    """

    hashed_seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    count_slots: Tensor
    token_counts: Tensor
    edit_start: Tensor
    edit_tokens: Tensor
    edit_banned_until: Tensor
    edit_bias: Tensor
    edited: bool
    filtered: bool


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """logits float32 [n, vocab_size], left as they are -> token ids int64 [n], their logprobs float32 [n]."""
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1
    slices = triton.cdiv(vocab_size, SLICE)
    scores = _edit(logits, rows) if rows.edited else logits
    threshold = _thresholds(scores, rows) if rows.filtered else None
    bests = torch.empty(
        (n, slices, 3), dtype=torch.float32, device=logits.device
    )  # best sum, and logsumexp's parts
    tokens = torch.empty((n, slices), dtype=torch.int32, device=logits.device)
    chosen = torch.empty(n, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(n, dtype=torch.float32, device=logits.device)
    _draw_kernel[(n, slices)](
        logits, scores, rows.temperatures, rows.hashed_seeds, rows.positions, threshold, bests, tokens,
        logits.stride(0), scores.stride(0), VOCAB_SIZE=vocab_size, SLICE=SLICE, FILTERED=rows.filtered,
        num_warps=8,
    )  # fmt: skip
    _choose_kernel[(n,)](
        logits, bests, tokens, rows.count_slots, rows.token_counts, chosen, logprobs, logits.stride(0),
        VOCAB_SIZE=vocab_size, SLICES=slices, PADDED=triton.next_power_of_2(slices), COUNTED=rows.edited,
        num_warps=1,
    )  # fmt: skip
    return chosen, logprobs


def _edit(logits: Tensor, rows: SamplingRows) -> Tensor:
    n, vocab_size = logits.shape
    scores = torch.empty((n, vocab_size), dtype=torch.float32, device=logits.device)
    penalties = (rows.count_slots, rows.token_counts, rows.repetition, rows.presence, rows.frequency)
    _penalize_kernel[(n, triton.cdiv(vocab_size, SLICE))](
        logits, scores, *penalties, logits.stride(0), VOCAB_SIZE=vocab_size, SLICE=SLICE, num_warps=8
    )
    _edit_kernel[(n,)](
        logits, scores, *penalties, rows.positions, rows.edit_start, rows.edit_tokens, rows.edit_banned_until,
        rows.edit_bias,
        logits.stride(0), VOCAB_SIZE=vocab_size, EDITS=64, num_warps=2,
    )  # fmt: skip
    return scores


def _thresholds(scores: Tensor, rows: SamplingRows) -> Tensor:
    n, vocab_size = scores.shape
    thresholds = torch.empty(n, dtype=torch.float32, device=scores.device)
    tile = min(THRESHOLD_TILE, triton.next_power_of_2(vocab_size))
    _threshold_kernel[(n,)](
        scores, rows.temperatures, rows.top_k, rows.top_p, rows.min_p, thresholds, scores.stride(0),
        VOCAB_SIZE=vocab_size, TILE=tile, num_warps=32 if tile == THRESHOLD_TILE else 4,
    )  # fmt: skip
    return thresholds


@triton.jit
def _penalized(x, words, repetition, presence, frequency):
    """``words``: of token_counts."""
    x = tl.where(words != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    generated = words & 0xFFFFFF
    return tl.where(generated > 0, x - (presence + frequency * generated.to(tl.float32)), x)


@triton.jit
def _penalize_kernel(
    logits,
    scores,
    count_slots,
    token_counts,
    repetition,
    presence,
    frequency,
    stride,
    VOCAB_SIZE: tl.constexpr,
    SLICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    real = token < VOCAB_SIZE
    x = tl.load(logits + row * stride + token, mask=real, other=0.0)
    slot = tl.load(count_slots + row).to(tl.int64)
    if slot >= 0:
        words = tl.load(token_counts + slot * VOCAB_SIZE + token, mask=real, other=0)
        x = _penalized(x, words, tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row))
    tl.store(scores + row * VOCAB_SIZE + token, x, mask=real)


@triton.jit
def _edit_kernel(
    logits, scores, count_slots, token_counts, repetition, presence, frequency, positions, edit_start,
    edit_tokens, edit_banned_until,
    edit_bias, stride, VOCAB_SIZE: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """One program a row: its edited tokens anew, from their logits on."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(edit_start + row + 1)
    position = tl.load(positions + row)
    slot = tl.load(count_slots + row).to(tl.int64)
    for start in range(tl.load(edit_start + row), end, EDITS):
        i = start + tl.arange(0, EDITS)
        token = tl.load(edit_tokens + i, mask=i < end, other=0)
        x = tl.load(logits + row * stride + token, mask=i < end, other=0.0) + tl.load(
            edit_bias + i, mask=i < end, other=0.0
        )
        x = tl.where(position < tl.load(edit_banned_until + i, mask=i < end, other=0), float("-inf"), x)
        if slot >= 0:
            words = tl.load(token_counts + slot * VOCAB_SIZE + token, mask=i < end, other=0)
            x = _penalized(
                x, words, tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
            )
        tl.store(scores + row * VOCAB_SIZE + token, x, mask=i < end)


@triton.jit
def _ordered(x):
    """int32 in the order of the float32 that they are made of; an involution."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    scores,
    temperature,
    highest,
    floor,
    wanted,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASS: tl.constexpr,
):
    """The highest float (as its key) such that the scores from it on are ``wanted`` many, or hold that much
    mass relative to the highest score. Never below ``floor``."""
    low = floor.to(tl.int64)
    high = _ordered(highest).to(tl.int64) + 1
    while high - low > 1:
        quarter = (high - low + 3) // 4
        first = low + quarter
        second = tl.minimum(first + quarter, high - 1)
        third = tl.minimum(second + quarter, high - 1)
        first = tl.minimum(first, high - 1)
        from_first = 0.0
        from_second = 0.0
        from_third = 0.0
        for start in range(0, VOCAB_SIZE, TILE):
            x, key = _tile(scores, temperature, start, VOCAB_SIZE, TILE)
            weight = tl.exp(x - highest) if MASS else tl.full([TILE], 1.0, tl.float32)
            from_first += tl.sum(tl.where(key >= first, weight, 0.0), 0)
            from_second += tl.sum(tl.where(key >= second, weight, 0.0), 0)
            from_third += tl.sum(tl.where(key >= third, weight, 0.0), 0)
        if from_third >= wanted:
            low = third
        elif from_second >= wanted:
            low = second
            high = third
        elif from_first >= wanted:
            low = first
            high = second
        else:
            high = first
    return low.to(tl.int32)


@triton.jit
def _tile(scores, temperature, start, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Scores over temperature (padding: -inf), and their keys."""
    token = start + tl.arange(0, TILE)
    x = (
        tl.div_rn(tl.load(scores + token, mask=token < VOCAB_SIZE, other=float("-inf")), temperature) + 0.0
    )  # no negative zero
    return x, tl.where(token < VOCAB_SIZE, _ordered(x), -2147483648)


@triton.jit
def _threshold_kernel(
    scores,
    temperatures,
    top_k,
    top_p,
    min_p,
    thresholds,
    stride,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row: the least score over temperature that stays."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    has_k = (k > 0) & (k < VOCAB_SIZE)
    if (temperature == 0.0) | ((least <= 0.0) & (p >= 1.0) & (k <= 0)):
        tl.store(thresholds + row, float("-inf"))
        return
    own = scores + row * stride
    highest = float("-inf")
    for start in range(0, VOCAB_SIZE, TILE):
        x, _ = _tile(own, temperature, start, VOCAB_SIZE, TILE)
        highest = tl.maximum(highest, tl.max(x, 0))
    floor = _ordered(tl.full([], float("-inf"), tl.float32))
    if least > 0.0:
        floor = _ordered(highest + log(least))
    if has_k:
        floor = tl.maximum(
            floor, _search(own, temperature, highest, floor, k.to(tl.float32), VOCAB_SIZE, TILE, MASS=False)
        )
    if p < 1.0:
        mass = 0.0
        kept = 0.0
        for start in range(0, VOCAB_SIZE, TILE):
            x, key = _tile(own, temperature, start, VOCAB_SIZE, TILE)
            mass += tl.sum(tl.where(key >= floor, tl.exp(x - highest), 0.0), 0)
            kept += tl.sum(tl.where(key >= floor, 1.0, 0.0), 0)
        if has_k:  # of the tokens that tie for place k, the mass of those beyond it does not count
            mass -= tl.maximum(kept - k.to(tl.float32), 0.0) * tl.exp(_unordered(floor) - highest)
        floor = tl.maximum(
            floor, _search(own, temperature, highest, floor, p * mass, VOCAB_SIZE, TILE, MASS=True)
        )
    tl.store(thresholds + row, _unordered(floor))


@triton.jit
def _splitmix(z):
    """On uint64."""
    z += 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _draw_kernel(
    logits, scores, temperatures, hashed_seeds, positions, thresholds, bests, tokens, stride, stride_scores,
    VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """One program a (row, slice): the slice's best token, and its part of the logits' logsumexp."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    real = token < VOCAB_SIZE
    x = tl.load(scores + row * stride_scores + token, mask=real, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        x = tl.div_rn(x, temperature)
        if FILTERED:
            x = tl.where(x >= tl.load(thresholds + row), x, float("-inf"))
        if tl.max(x, 0) > float("-inf"):
            seed = tl.load(hashed_seeds + row).to(tl.uint64, bitcast=True)
            key = _splitmix(seed ^ tl.load(positions + row).to(tl.uint64))
            x += gumbel_noise((key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32), token)
    best, chosen = best_token(x, token, VOCAB_SIZE)
    raw = tl.load(logits + row * stride + token, mask=real, other=float("-inf"))
    highest = tl.max(raw, 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(bests + at * 3, best)
    tl.store(bests + at * 3 + 1, highest)
    tl.store(bests + at * 3 + 2, tl.sum(tl.exp(raw - tl.where(highest == float("-inf"), 0.0, highest)), 0))
    tl.store(tokens + at, chosen)


@triton.jit
def _choose_kernel(
    logits, bests, tokens, count_slots, token_counts, chosen, logprobs, stride,
    VOCAB_SIZE: tl.constexpr, SLICES: tl.constexpr, PADDED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One program a row: the best of its slices, its logprob, and its count."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    at = bests + (row * SLICES + i) * 3
    token = tl.load(tokens + row * SLICES + i, mask=i < SLICES, other=VOCAB_SIZE)
    _, best = best_token(tl.load(at, mask=i < SLICES, other=float("-inf")), token, VOCAB_SIZE)
    maxima = tl.load(at + 1, mask=i < SLICES, other=float("-inf"))
    highest = tl.max(maxima, 0)
    mass = tl.sum(tl.load(at + 2, mask=i < SLICES, other=0.0) * tl.exp(maxima - highest), 0)
    tl.store(chosen + row, best.to(tl.int64))
    tl.store(logprobs + row, tl.load(logits + row * stride + best) - highest - log(mass))
    if COUNTED:
        slot = tl.load(count_slots + row).to(tl.int64)
        if slot >= 0:
            count = token_counts + slot * VOCAB_SIZE + best
            tl.store(count, tl.load(count) + 1)
