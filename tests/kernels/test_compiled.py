"""What the GPU's kernels become for sm_90, compiled in a process of its own: this one interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from splitserve.bench.compile_bounds import OCCUPANCY, faults_of
from splitserve.bench.compile_kernels import CASES
from splitserve.bench.sm90 import SHARED_MEMORY

Kernels = list[dict[str, Any]]
LEFT_TO_GPU_CHECK = {  # which compiles them all: these differ from a tested one in little
    "decode 128 float16",
    "decode 256 exact",
    "prefill 128 options",
    "decode 128 block 16",
    "decode 128 options",
    "prefill 64",
    "prefill 128 float16",
    "prefill 128 group 7",
    "prefill 128 fp8",
    "norm 2560",
    "rope 128",
    "silu_mul",
    "embedding",
    "pack",
    "gumbel_argmax",
    "exact linear 512 rows",
    "quantize rows",
}
TESTED = [name for name in CASES if name not in LEFT_TO_GPU_CHECK]

pytestmark = pytest.mark.timeout(400)  # twenty seconds of compiling, on a machine that may be busy


@pytest.fixture(scope="module")
def compiled() -> dict[str, Kernels]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "splitserve.bench.compile_kernels", *TESTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Kernels] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", TESTED)
def test_a_kernel_is_within_its_bounds(compiled: dict[str, Kernels], case: str) -> None:
    assert faults_of(case, compiled[case]) == []


def test_the_bounds_are_of_cases_that_are_there_and_can_be_broken() -> None:
    assert OCCUPANCY.keys() <= CASES.keys()
    good = {"name": "k", "stack": 0, "spills": 0, "shared": SHARED_MEMORY, "wgmma": 1, "mma": 1, "async_copies": 1, "programs_per_sm": 4}
    assert faults_of("decode 64", [good]) == faults_of("prefill 128", [good]) == []
    for case, field, value in (
        ("decode 64", "spills", 1),
        ("prefill 128", "stack", 8),
        ("decode 64", "shared", SHARED_MEMORY + 1),
        ("prefill 128", "wgmma", 0),
        ("decode 128 exact", "wgmma", 0),
        ("decode 64", "async_copies", 0),
        ("decode 64", "programs_per_sm", 3),
    ):
        assert len(faults_of(case, [{**good, field: value}])) == 1, (case, field)
