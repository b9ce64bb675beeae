"""The noise of ``gumbel_noise.py`` on the device, and a float32 logarithm good to its last bits.

The GPU's own logarithm is wrong by 2^-22 near 1, where the largest noise comes from. This one is Cephes'
``logf``: take out the exponent, so that 0.7 < x < 1.42, then a polynomial in x - 1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log(x):
    """Natural logarithm of normal positive float32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)  # in [0.5, 1)
    small = mantissa < 0.70710678
    exponent = tl.where(small, exponent - 1, exponent).to(tl.float32)
    x = tl.where(small, mantissa + mantissa, mantissa) - 1.0
    square = x * x
    y = 7.0376836292e-2 * x - 1.1514610310e-1
    y = y * x + 1.1676998740e-1
    y = y * x - 1.2420140846e-1
    y = y * x + 1.4249322787e-1
    y = y * x - 1.6668057665e-1
    y = y * x + 2.0000714765e-1
    y = y * x - 2.4999993993e-1
    y = y * x + 3.3333331174e-1
    y = y * x * square - 2.12194440e-4 * exponent - 0.5 * square
    return x + y + 0.693359375 * exponent


@triton.jit
def uniform(first_key, second_key, tokens):
    """float32 in (0, 1], of the shape of ``tokens`` (int32); the keys are uint32."""
    h = _mix(_mix(tokens.to(tl.uint32) * 0x9E3779B1 + first_key) ^ second_key)
    return (h.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def gumbel_noise(first_key, second_key, tokens):
    """-log(-log1p(-v)) of uniform v, with log1p(-v) = log(u) + (1 - u - v) / u."""
    v = tl.minimum(uniform(first_key, second_key, tokens), 0.99999994)
    u = 1.0 - v
    return -log(-(log(u) - (v - (1.0 - u)) / u))


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)
