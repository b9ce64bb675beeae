"""argmax over tokens of logit + Gumbel noise: a sample of softmax(logits) for each row, without leaving the
device.

Bytes: each float32 logit once. About 60 operations a logit, most of them the noise. A program takes a slice
of a row and keeps its best token; a second kernel takes the best of those. Equal sums: the smaller token id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling_noise import gumbel_noise

SLICE = 4096  # tokens


def gumbel_argmax(logits: Tensor, keys: Tensor) -> Tensor:
    """logits float32 [n, vocab_size], keys int64 [n, 2] of ``gumbel_noise.noise_key`` -> int64 [n]."""
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1
    slices = triton.cdiv(vocab_size, SLICE)
    sums = torch.empty((n, slices), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((n, slices), dtype=torch.int32, device=logits.device)
    chosen = torch.empty(n, dtype=torch.int64, device=logits.device)
    _slice_kernel[(n, slices)](
        logits,
        keys.contiguous(),
        sums,
        tokens,
        logits.stride(0),
        VOCAB_SIZE=vocab_size,
        SLICE=SLICE,
        num_warps=8,
    )
    _best_kernel[(n,)](
        sums,
        tokens,
        chosen,
        VOCAB_SIZE=vocab_size,
        SLICES=slices,
        PADDED=triton.next_power_of_2(slices),
        num_warps=1,
    )
    return chosen


@triton.jit
def best_token(values, tokens, VOCAB_SIZE: tl.constexpr):
    """The largest value and its token; of equal ones the smallest token."""
    best = tl.max(values, 0)
    return best, tl.minimum(tl.min(tl.where(values == best, tokens, VOCAB_SIZE), 0), VOCAB_SIZE - 1)


@triton.jit
def _slice_kernel(logits, keys, sums, tokens, stride, VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    values = tl.load(logits + row * stride + token, mask=token < VOCAB_SIZE, other=float("-inf"))
    first_key = tl.load(keys + row * 2).to(tl.uint32)
    second_key = tl.load(keys + row * 2 + 1).to(tl.uint32)
    best, chosen = best_token(values + gumbel_noise(first_key, second_key, token), token, VOCAB_SIZE)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + at, best)
    tl.store(tokens + at, chosen)


@triton.jit
def _best_kernel(sums, tokens, chosen, VOCAB_SIZE: tl.constexpr, SLICES: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, PADDED)
    values = tl.load(sums + row * SLICES + i, mask=i < SLICES, other=float("-inf"))
    token = tl.load(tokens + row * SLICES + i, mask=i < SLICES, other=VOCAB_SIZE)
    _, best = best_token(values, token, VOCAB_SIZE)
    tl.store(chosen + row, best.to(tl.int64))
