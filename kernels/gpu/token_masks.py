"""Tokens that a row's bit mask forbids get the logit -inf.

Bytes: one bit a token is read, 4 a forbidden token are written; no logit is read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SLICE = 4096  # tokens


def forbid(logits: Tensor, masks: Tensor) -> None:
    """Change ``logits`` float32 [n, vocab_size] in place. ``masks`` int32 [m, 1 + ceil(vocab_size / 32)]:
    the row of ``logits``, then its mask: bit ``i % 32`` of word ``i // 32`` is set where token ``i`` may
    follow."""
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1
    assert masks.shape[1] == 1 + triton.cdiv(vocab_size, 32)
    _forbid_kernel[(len(masks), triton.cdiv(vocab_size, SLICE))](
        logits, masks, logits.stride(0), VOCAB_SIZE=vocab_size, SLICE=SLICE, num_warps=4
    )


@triton.jit
def _forbid_kernel(logits, masks, stride, VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr):
    mask = masks + tl.program_id(0) * (1 + (VOCAB_SIZE + 31) // 32)
    row = tl.load(mask).to(tl.int64)
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    real = token < VOCAB_SIZE
    allowed = (tl.load(mask + 1 + token // 32, mask=real, other=-1) >> (token % 32)) & 1
    tl.store(logits + row * stride + token, float("-inf"), mask=real & (allowed == 0))
