"""Sampling noise as a pure function of (seed, position, token id): the same on every worker, batch, epoch and
device.

All integers are exact, so that a kernel in any language gives the same bits (32-bit arithmetic is modulo
2^32):

    splitmix(z) = z += 0x9E3779B97F4A7C15; z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
                  z = (z ^ z >> 27) * 0x94D049BB133111EB; z ^ z >> 31
    key    = splitmix(splitmix(seed) ^ position)                 64 bits; k0 = low half, k1 = high half
    mix(x) = x ^= x >> 16; x *= 0x85EBCA6B; x ^= x >> 13; x *= 0xC2B2AE35; x ^ x >> 16
    h      = mix(mix(token * 0x9E3779B1 + k0) ^ k1)               32 bits
    v      = min((float(h) + 0.5) * 2^-32, 1 - 2^-24)            float32, uniform in (0, 1), finest near 0
    noise  = -log(-log1p(-v))                                    float32, Gumbel; large values from small v

argmax over tokens of logit + noise is a sample of softmax(logits) (the Gumbel-max trick). splitmix: Steele et
al., 2014; mix: the finalizer of MurmurHash3.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
TOKEN_STEP = 0x9E3779B1
LARGEST_V = 1.0 - 2.0**-24


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """(k0, k1) of the formula."""
    key = _splitmix(_splitmix(seed & MASK64) ^ position)
    return key & MASK32, key >> 32


def hashed_seed(seed: int) -> int:
    """splitmix(seed) as a signed 64-bit number: what a device needs to make a row's keys of its positions."""
    hashed = _splitmix(seed & MASK64)
    return hashed - (1 << 64) if hashed >> 63 else hashed


def noise_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """h: int64 in [0, 2^32). keys int64 [n, 2], token_ids int64 [n or 1, m] -> [n, m]."""
    first = _mix((token_ids * TOKEN_STEP + keys[:, :1]) & MASK32)
    return _mix(first ^ keys[:, 1:])


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [n, m]; arguments as for ``noise_bits``."""
    v = ((noise_bits(keys, token_ids).float() + 0.5) * 2.0**-32).clamp(max=LARGEST_V)
    return -torch.log(-torch.log1p(-v))


def _splitmix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def _mix(x: Tensor) -> Tensor:
    """On int64 tensors that hold 32-bit values. A product may wrap modulo 2^64: its low 32 bits stay
    right."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)
