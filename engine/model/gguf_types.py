"""GGUF's types of weights, and the files of the folder that stands for a GGUF file. Free of torch."""

from __future__ import annotations

WEIGHTS = "model.gguf"
TABLE = "model.gguf.json"
"""Each tensor's type, shape, and first and last byte in WEIGHTS, by the name that the family has for it."""
PLAIN = ("F32", "F16", "BF16")
BLOCKS = {
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_0": (32, 34),
}  # fmt: skip
"""Numbers of a block, and its bytes."""


def packed_bytes(kind: str) -> float:
    """Size of a number in memory, with its part of the scales (``gguf_blocks.py``)."""
    codes = 0.5 if kind[:2] in ("Q2", "Q3", "Q4") else 1.0
    with_minimums = 1 + (kind in ("Q2_K", "Q4_K", "Q5_K") or kind.endswith("_1"))
    if not kind.endswith("_K"):
        return codes + with_minimums * 2 / 32
    return codes + with_minimums * (1 / (32 if kind in ("Q4_K", "Q5_K") else 16) + 2 / 256)
