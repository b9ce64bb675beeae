"""Which attention kernels there are to compile for a GPU: each family in every head dimension, type of cache
and option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from ...kernels.gpu.attention_tiles import TileShape
from ...kernels.gpu.decode_attention import decode_tile, programs_per_sm
from ...kernels.gpu.prefill_attention import exact_tile, prefill_tile

FAMILIES, HEAD_DIMS, CACHES = (
    ("decode", "prefill"),
    (64, 96, 128, 256),
    ("bfloat16", "float16", "fp8", "fp8 float16"),
)
GROUPS, BLOCK_SIZES = (4, 7), (64, 16)
PRODUCTS = (
    (0, 0, 0, 0),
    (0, 1, 2, 3),
    (0, 2, 3, 1),
    (0, 3, 1, 2),
)  # of the field of four elements, whose sum is exclusive or


@dataclass(frozen=True, slots=True)
class Attention:
    """``cache``: one of CACHES; a float8 one is of a model in bfloat16, or in float16. ``group``: query heads
    of a KV head."""

    family: str
    head_dim: int
    cache: str = "bfloat16"
    window: bool = False
    exact: bool = False
    group: int = 4
    block_size: int = 64
    softcap: float = 0.0
    sinks: bool = False

    def __str__(self) -> str:
        options = [name for name in ("window", "exact", "softcap", "sinks") if getattr(self, name)]
        odd = [
            f"{name} {value}"
            for name, value, usual in (("group", self.group, 4), ("block", self.block_size, 64))
            if value != usual
        ]
        return " ".join([self.family, str(self.head_dim), self.cache, *options, *odd])

    @property
    def fp8(self) -> bool:
        return self.cache.startswith("fp8")

    @property
    def dtype(self) -> torch.dtype:
        """Type of the queries."""
        return torch.float16 if self.cache in ("float16", "fp8 float16") else torch.bfloat16

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def tile(self) -> TileShape:
        if self.exact:
            return exact_tile(self.head_dim, fp8=self.fp8)
        return (
            decode_tile(self.head_dim, self.group, fp8=self.fp8)
            if self.family == "decode"
            else prefill_tile(self.head_dim, fp8=self.fp8)
        )

    @property
    def programs_per_sm(self) -> int:
        """That its launches count on."""
        decodes = self.family == "decode" and not self.exact
        return programs_per_sm(self.head_dim, self.group, self.block_size) if decodes else 1


def covering() -> Iterator[Attention]:
    """Sixteen, among which any two values of any two fields are together in one: an orthogonal array (Bose
    and Bush, 1952) of five columns of four levels; two of them are two fields of two levels each."""
    for i, j in product(range(4), repeat=2):
        options, sizes, kinds = (i ^ PRODUCTS[factor][j] for factor in (1, 2, 3))
        yield Attention(
            FAMILIES[kinds >> 1], HEAD_DIMS[i], CACHES[j], bool(options & 1), bool(sizes & 1),
            GROUPS[kinds & 1], BLOCK_SIZES[sizes >> 1],
        )  # fmt: skip


def every() -> Iterator[Attention]:
    """All, with the usual group and block size and with unusual ones; those with all options first, which
    need the most registers."""
    for window in (True, False):
        for group, block_size in zip(GROUPS, BLOCK_SIZES, strict=True):
            for family, head_dim, cache, exact in product(FAMILIES, HEAD_DIMS, CACHES, (False, True)):
                yield Attention(family, head_dim, cache, window, exact, group, block_size)


SOFTCAPPED = [Attention(family, 256, window=True, softcap=50.0) for family in FAMILIES]
SINKED = [Attention(family, 64, window=True, sinks=True) for family in FAMILIES]
LARGE = [
    Attention(
        family, 512, "float16" if small else "bfloat16", exact=exact, group=8, block_size=16 if small else 64
    )
    for family, exact, small in product(FAMILIES, (False, True), (False, True))
]  # Gemma 4's layers without a window
VARIANTS = {str(variant): variant for variant in (*covering(), *SOFTCAPPED, *SINKED, *LARGE, *every())}
"""By name; the covering ones first."""
