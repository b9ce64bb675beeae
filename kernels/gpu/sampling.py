"""One token a row from its logits, on the device: edits, penalties, temperature, min-p, top-k, top-p, noise,
logprobs.

In the order and with the meaning of ``engine/step/sampler.py``:

    x = logit + bias (-inf while the token is banned);
    seen tokens: x / r where x > 0, x * r elsewhere (repetition penalty r);
    generated tokens: x -= presence + frequency * count;  x /= temperature (0: argmax x, and that is all)
    keep x >= max(x) + log(min_p);  of these the top_k largest;
    of these the fewest that hold top_p of their mass; ties stay
    token = argmax of the kept x + noise(seed, position, token);
    logprob = logit[token] - logsumexp(logits), of the logits as they came

No row looks at another, and all sums have one order. Bytes: 4 a logit for a plain batch, 8 more where a row
has penalties or edits; sampling_threshold.py has min-p, top-k and top-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling_noise import gumbel_noise, log, uniform
from .sampling_threshold import thresholds

SLICE, DRAW_WARPS = 4096, 4  # tokens that a program takes
IN_PROMPT = 1 << 30  # in a word of ``token_counts``, beside the number of times that the token was generated


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to sample each of n rows; tensors on the logits' device.

    hashed_seeds int64 [n]   splitmix(seed): see gumbel_noise.py
    positions    int32 [n]   of the tokens to be sampled
    temperatures, top_p, min_p, repetition, presence, frequency   float32 [n]
    top_k        int32 [n]   0: all
    count_slots  int32 [n]   row of ``token_counts``; -1: no penalties
    token_counts int32 [any, vocab_size]   the tokens generated are added to it here
    edit_start   int32 [n + 1]   which of the edits are a row's
    edit_tokens, edit_banned_until int32, edit_bias float32 [any]   a token may be edited once; banned while
                 position < banned_until
    edited, filtered   whether any row has penalties or edits; min_p, top_k or top_p
    reporting    int64       the rows whose logprobs are asked for; ``sample`` does not read it
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
    reporting: Tensor | None = None


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """logits float32 [n, vocab_size], left as they are -> token ids int64 [n], their logprobs float32 [n]."""
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1
    slices = triton.cdiv(vocab_size, SLICE)
    scores = _edit(logits, rows) if rows.edited else logits
    threshold = (
        thresholds(scores, rows.temperatures, rows.top_k, rows.top_p, rows.min_p) if rows.filtered else None
    )
    # best sum, and logsumexp's parts
    bests = torch.empty((n, slices, 3), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((n, slices), dtype=torch.int32, device=logits.device)
    chosen = torch.empty(n, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(n, dtype=torch.float32, device=logits.device)
    _draw_kernel[(n, slices)](
        logits, scores, rows.temperatures, rows.hashed_seeds, rows.positions, threshold, bests, tokens,
        logits.stride(0), scores.stride(0), VOCAB_SIZE=vocab_size, SLICE=SLICE, EDITED=rows.edited,
        FILTERED=rows.filtered, num_warps=DRAW_WARPS,
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


@triton.jit
def _penalized(x, words, repetition, presence, frequency):
    """``words``: of token_counts."""
    x = tl.where(words != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    generated = words & 0xFFFFFF
    return tl.where(generated > 0, x - (presence + frequency * generated.to(tl.float32)), x)


@triton.jit
def _penalize_kernel(
    logits, scores, count_slots, token_counts, repetition, presence, frequency, stride,
    VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
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
def _best_token(values, tokens, VOCAB_SIZE: tl.constexpr):
    """The largest value and its token; of equal ones the smallest token."""
    best = tl.max(values, 0)
    return best, tl.minimum(tl.min(tl.where(values == best, tokens, VOCAB_SIZE), 0), VOCAB_SIZE - 1)


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
    VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr, EDITED: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """One program a (row, slice): the slice's best token, and its part of the logits' logsumexp.

    The noise of a uniform v is at most -log(v), for -log(1 - v) >= v. So tokens are tried from the highest
    exp(x) / v on, until no other can be better: one or two of a slice, and only these need logarithms.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    real = token < VOCAB_SIZE
    scores += row * stride_scores
    score = tl.load(scores + token, mask=real, other=float("-inf"))
    raw = score
    if EDITED:
        raw = tl.load(logits + row * stride + token, mask=real, other=float("-inf"))
    highest = tl.max(raw, 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(bests + at * 3 + 1, highest)
    mass = tl.sum(tl.exp2((raw - tl.where(highest == float("-inf"), 0.0, highest)) * 1.4426950408889634), 0)
    tl.store(bests + at * 3 + 2, mass)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        if FILTERED:
            score = tl.where(score >= tl.load(thresholds + row), score, float("-inf"))
        seed = tl.load(hashed_seeds + row).to(tl.uint64, bitcast=True)
        key = _splitmix(seed ^ tl.load(positions + row).to(tl.uint64))
        first, second = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
        best, chosen = tl.full([], float("-inf"), tl.float32), tl.program_id(1) * SLICE
        top = tl.max(score, 0)
        if top > float("-inf"):
            root = tl.rsqrt(uniform(first, second, token))
            bound = tl.exp2((score - top) * (1.4426950408889634 / temperature)) * root * root
            most, x = tl.max(bound, 0), tl.div_rn(top, temperature)
            x += 1e-4 + 1e-6 * tl.abs(x)  # more than all that was rounded
            while (most > 0.0) & (log(most) + x >= best):
                tried = tl.min(tl.where(bound == most, token, VOCAB_SIZE), 0)
                found = tl.div_rn(tl.load(scores + tried), temperature) + gumbel_noise(first, second, tried)
                chosen = tl.where((found > best) | ((found == best) & (tried < chosen)), tried, chosen)
                best = tl.maximum(found, best)
                bound = tl.where(token == tried, 0.0, bound)
                most = tl.max(bound, 0)
    else:
        best, chosen = _best_token(score, token, VOCAB_SIZE)
    tl.store(bests + at * 3, best)
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
    _, best = _best_token(tl.load(at, mask=i < SLICES, other=float("-inf")), token, VOCAB_SIZE)
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
