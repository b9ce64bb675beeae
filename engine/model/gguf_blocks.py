"""Blocks of GGUF's types as codes and scales, exactly: no number is rounded.

    32 numbers   Q4_0, Q5_0, Q8_0: d (q - half);  Q4_1, Q5_1: d q + m
    256 numbers  Q3_K, Q6_K: d s (q - half);  Q2_K, Q4_K, Q5_K: d s q - dmin m, s and m
                 whole numbers of each group of 32 (Q4_K, Q5_K) or 16

Types of up to 4 bits become codes of 4 bits, the others codes of 8. The formats: ggml's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.quantised import QuantisedWeight
from .gguf_types import BLOCKS

Decoded = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Codes uint8 [..., block]; scales [..., groups]; minimums, alike, or None; supers [..., 1 or 2], or None."""


def weight_of_blocks(kind: str, blocks: Tensor) -> QuantisedWeight:
    """``blocks``: uint8 [out, bytes]."""
    numbers, num_bytes = BLOCKS[kind]
    split = _split(blocks, -1, num_bytes)
    codes, scales, minimums, supers = DECODERS[kind](split)
    bits = 4 if kind[:2] in ("Q2", "Q3", "Q4") else 8
    codes = codes.flatten(1)
    columns = codes.shape[1]
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return QuantisedWeight(
        codes.contiguous(), scales.flatten(1), columns, numbers // scales.shape[-1], 4 if bits == 4 else 8,
        minimums=None if minimums is None else minimums.flatten(1), supers=supers,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantisedTable:
    """A vocabulary's vectors in blocks: uint8 [vocab_size, bytes]."""

    kind: str
    blocks: Tensor

    def rows(self, rows: Tensor | slice) -> Tensor:
        """float32 [len(rows), numbers]."""
        return weight_of_blocks(self.kind, self.blocks[rows]).dequantised()


def _split(b: Tensor, *sizes: int) -> Tensor:
    """The last axis as several."""
    return b.reshape(*b.shape[:-1], *sizes)


def _half(b: Tensor, at: int) -> Tensor:
    """float32 [..., 1] of the float16 at this byte of each block."""
    return b[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(b: Tensor) -> Tensor:
    """The low ones, then the high ones."""
    return torch.cat((b & 15, b >> 4), -1)


def _shifted(b: Tensor, shifts: list[int], mask: int) -> Tensor:
    """[..., bytes] -> [..., shifts, bytes]."""
    return b.unsqueeze(-2) >> torch.tensor(shifts, dtype=torch.uint8, device=b.device).unsqueeze(-1) & mask


def _fifth_bits(b: Tensor) -> Tensor:
    """16, or 0, for each of 32 numbers from 4 bytes."""
    bits = b.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=b.device) & 1
    return bits.flatten(-2) << 4


def _q4_0(b: Tensor) -> Decoded:
    return _nibbles(b[..., 2:]), _half(b, 0), None, None


def _q4_1(b: Tensor) -> Decoded:
    return _nibbles(b[..., 4:]), _half(b, 0), -_half(b, 2), None


def _q5_0(b: Tensor) -> Decoded:
    codes = (_nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6])) + (128 - 16)
    return codes, _half(b, 0), None, None


def _q5_1(b: Tensor) -> Decoded:
    return _nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8]), _half(b, 0), -_half(b, 2), None


def _q8_0(b: Tensor) -> Decoded:
    return b[..., 2:] ^ 128, _half(b, 0), None, None


def _q2_k(b: Tensor) -> Decoded:
    halves = _split(b[..., 16:80], 2, 32)
    codes = _shifted(halves, [0, 2, 4, 6], 3).flatten(-3)
    return _two_levels(codes, b[..., :16] & 15, b[..., :16] >> 4, b[..., 80:])


def _q3_k(b: Tensor) -> Decoded:
    halves = _split(b[..., 32:96], 2, 32)
    high = _shifted(b[..., :32], list(range(8)), 1).flatten(-2) << 2
    codes = (_shifted(halves, [0, 2, 4, 6], 3).flatten(-3) | high) + (8 - 4)
    packed = b[..., 96:108]
    low, top = _nibbles(packed[..., :8]), _shifted(packed[..., 8:], [0, 2, 4, 6], 3).flatten(-2)
    scales = (low | top << 4).to(torch.int8) - 32
    return _two_levels(codes, scales, None, b[..., 108:])


def _q4_k(b: Tensor) -> Decoded:
    codes = _nibbles(_split(b[..., 16:], 4, 32)).flatten(-2)
    return _two_levels(codes, *_six_bits(b[..., 4:16]), b[..., :4])


def _q5_k(b: Tensor) -> Decoded:
    high = _shifted(b[..., 16:48], list(range(8)), 1).flatten(-2) << 4
    codes = _nibbles(_split(b[..., 48:], 4, 32)).flatten(-2) | high
    return _two_levels(codes, *_six_bits(b[..., 4:16]), b[..., :4])


def _q6_k(b: Tensor) -> Decoded:
    low = _nibbles(_split(b[..., :128], 2, 64)).flatten(-2)
    high = _shifted(_split(b[..., 128:192], 2, 32), [0, 2, 4, 6], 3).flatten(-3)
    codes = (low | high << 4) + (128 - 32)
    return _two_levels(codes, b[..., 192:208].contiguous().view(torch.int8), None, b[..., 208:])


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of 6 bits from 12 bytes."""
    first, second, rest = _split(packed, 3, 4).unbind(-2)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), -1)
    return scales, minimums


def _two_levels(codes: Tensor, scales: Tensor, minimums: Tensor | None, halves: Tensor) -> Decoded:
    """``halves``: the bytes of d, and of dmin where there are minimums."""
    d = _half(halves, 0)
    if minimums is None:
        return codes, d * scales.float(), None, d
    least = _half(halves, 2)
    return codes, d * scales.float(), least * minimums.float(), torch.cat((d, least), -1)


DECODERS: dict[str, Callable[[Tensor], Decoded]] = {
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_0": _q5_0,
    "Q5_1": _q5_1, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_0": _q8_0,
}  # fmt: skip
