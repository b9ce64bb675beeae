"""What the GPU's kernels become for sm_90, compiled in a process of its own: this one interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from splitserve.bench.compile_kernels import CASES
from splitserve.bench.sm90 import SHARED_MEMORY
from splitserve.kernels.gpu.decode_attention import programs_per_sm

Kernels = list[dict[str, Any]]
LEFT_TO_GPU_CHECK = {
    "decode 96",
    "decode 256 exact",
    "prefill 128 options",
    "decode 128 block 16",
    "decode 128 options",
    "prefill 64",
    "prefill 96",
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
def test_nothing_spills_and_all_fits(compiled: dict[str, Kernels], case: str) -> None:
    for kernel in compiled[case]:
        assert (kernel["stack"], kernel["spills"]) == (0, 0), kernel
        assert kernel["shared"] <= SHARED_MEMORY, kernel


@pytest.mark.parametrize("case", [name for name in TESTED if name.startswith("prefill") or "exact" in name])
def test_prefill_and_exact_kernels_multiply_with_warp_groups(compiled: dict[str, Kernels], case: str) -> None:
    assert compiled[case][-1]["wgmma"] > 0


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("decode 64", programs_per_sm(64, 4, 64, torch.bfloat16)),
        ("decode 128", programs_per_sm(128, 4, 64, torch.bfloat16)),
        ("decode 128 group 7", programs_per_sm(128, 7, 64, torch.bfloat16)),
        ("decode 128 fp8", programs_per_sm(128, 4, 64, torch.float8_e4m3fn)),
        ("decode 256", programs_per_sm(256, 4, 64, torch.bfloat16)),
    ],
)
def test_decode_multiplies_with_tensor_cores_and_fills_an_sm(compiled: dict[str, Kernels], case: str, expected: int) -> None:
    kernel = compiled[case][-1]
    assert kernel["mma"] > 0
    assert kernel["async_copies"] > 0
    assert kernel["programs_per_sm"] >= expected
