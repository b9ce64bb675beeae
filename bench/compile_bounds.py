"""What the GPU's kernels must have become for sm_90: one list, for the tests and for gpu_check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..kernels.gpu.decode_attention import programs_per_sm
from .sm90 import SHARED_MEMORY

OCCUPANCY = {  # programs that a multiprocessor holds at once, as decode attention's launches count on
    "decode 64": programs_per_sm(64, 4, 64, torch.bfloat16),
    "decode 128": programs_per_sm(128, 4, 64, torch.bfloat16),
    "decode 128 float16": programs_per_sm(128, 4, 64, torch.float16),
    "decode 128 group 7": programs_per_sm(128, 7, 64, torch.bfloat16),
    "decode 128 fp8": programs_per_sm(128, 4, 64, torch.float8_e4m3fn),
    "decode 256": programs_per_sm(256, 4, 64, torch.bfloat16),
}


def faults_of(case: str, kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with a case of compile_kernels.py, in words: nothing may spill, all must fit; attention and exact products multiply
    with matrix instructions, prefill with those of warp groups; decode reads ahead and fills the multiprocessors."""
    faults = []
    for kernel in kernels:
        if kernel["stack"] or kernel["spills"]:
            faults.append(f"{case}: {kernel['name']} spills")
        if kernel["shared"] > SHARED_MEMORY:
            faults.append(f"{case}: {kernel['name']} needs {kernel['shared']} bytes of shared memory")
    last = kernels[-1]
    if (case.startswith("prefill") or "exact" in case) and not last["wgmma"]:
        faults.append(f"{case}: no matrix instructions of warp groups")
    if case.startswith("decode") and not ((last["mma"] or last["wgmma"]) and last["async_copies"]):
        faults.append(f"{case}: no matrix instructions, or nothing read ahead")
    if last["programs_per_sm"] < OCCUPANCY.get(case, 1):
        faults.append(f"{case}: {last['programs_per_sm']} programs a multiprocessor, {OCCUPANCY[case]} expected")
    return faults
