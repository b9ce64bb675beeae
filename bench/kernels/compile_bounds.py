"""What the GPU's kernels must have become for sm_90: one list, for the tests and for gpu_check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .attention_variants import VARIANTS
from .sm90 import SHARED_MEMORY

PRODUCTS = ("exact", "quantised")  # cases of products for warp groups
WARP_GROUP_ROWS = 64  # of its smallest product
FEW_BYTES = 32
"""Bytes of stack allowed in cases that the tests do not compile: the assembler keeps a few values there that
are used before and after the loops, to fit one more program on a multiprocessor (decode, head dim 64, with a
window alone: 24)."""


def faults_of(case: str, kernels: Sequence[Mapping[str, Any]], allowed_stack: int = 0) -> list[str]:
    """What is wrong with a case of compile_kernels.py, in words: nothing may spill, all must fit; attention
    and exact or quantised products multiply with matrix instructions, those of warp groups where a tile has
    the rows for one; exact attention leaves no rounding to the compiler; decode reads ahead; as many programs
    fill a multiprocessor as launches count on. ``allowed_stack``: bytes a thread that may lie on the stack
    all the same."""
    faults = []
    for kernel in kernels:
        if kernel["stack"] > allowed_stack:
            faults.append(f"{case}: {kernel['name']} spills {kernel['stack']} bytes")
        if kernel["shared"] > SHARED_MEMORY:
            faults.append(f"{case}: {kernel['name']} needs {kernel['shared']} bytes of shared memory")
        if kernel["programs_per_sm"] < 1:
            faults.append(f"{case}: {kernel['name']} needs more registers than there are")
    last, variant = kernels[-1], VARIANTS.get(case)
    if (variant is None and case.startswith(PRODUCTS)) or (
        variant is not None and variant.tile.rows >= WARP_GROUP_ROWS
    ):
        if not last["wgmma"]:
            faults.append(f"{case}: no matrix instructions of warp groups")
    elif variant is not None and not last["mma"]:
        faults.append(f"{case}: no matrix instructions")
    if variant is not None and variant.exact and last["contracts"]:
        faults.append(f"{case}: the compiler may choose what is rounded")
    if variant is not None and not last["async_copies"]:
        faults.append(f"{case}: nothing is read ahead")
    if variant is not None and 1 <= last["programs_per_sm"] < variant.programs_per_sm:
        faults.append(
            f"{case}: {last['programs_per_sm']} programs a multiprocessor, {variant.programs_per_sm} expected"
        )
    return faults
