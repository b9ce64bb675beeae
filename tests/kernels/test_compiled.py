"""What the GPU's kernels become for sm_90, compiled in a process of its own: this one interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from itertools import combinations, product
from typing import Any

import pytest

from splitserve.bench.kernels.attention_variants import LARGE, SINKED, SOFTCAPPED, Attention, covering, every
from splitserve.bench.kernels.compile_bounds import FEW_BYTES, WARP_GROUP_ROWS, faults_of
from splitserve.bench.kernels.compile_kernels import OTHERS
from splitserve.bench.kernels.gate_up import DISTINCT_TILES
from splitserve.bench.kernels.sm90 import SHARED_MEMORY
from splitserve.bench.kernels.start_kernels import STARTED

Kernels = list[dict[str, Any]]
USUAL = [str(Attention(family, 128)) for family in ("decode", "prefill")]
LEFT_TO_GPU_CHECK = {
    "norm 896 float16",
    "silu_mul float16",
    "embedding float16",
    "quantize rows float16",
    "exact linear 512 rows float16",
    "latent decode float16",
    "latent, 16 heads",
    *(name for name in OTHERS if name.startswith(("quantised", "experts in"))),
} - {
    *(
        f"quantised {form}, {rows} rows"
        for form in ("int4", "float8 in blocks", "W8A8")
        for rows in (1, 4096)
    ),
    "experts in MXFP4, 1024 rows",
    "quantised int8, 64 rows",
    "quantised AWQ, 512 rows",
    "quantised float8 in blocks, 512 rows",
    "quantised GPTQ of 4 bits, 4096 rows",
    "quantised Q4_K, 1 rows",
}
TESTED = [
    *USUAL,
    *map(str, [*SOFTCAPPED, *SINKED, *LARGE, *covering()]),
    *(name for name in OTHERS if name not in LEFT_TO_GPU_CHECK),
    *(name for name in STARTED if "Qwen3-0.6B" in name or "any: 256" in name or "exact 1024 x 1024" in name),
]

pytestmark = pytest.mark.timeout(400)  # forty seconds of compiling, on a machine that may be busy


@pytest.fixture(scope="module")
def compiled() -> dict[str, Kernels]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "splitserve.bench.kernels.compile_kernels", *TESTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["case"]: line["kernels"] for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", TESTED)
def test_a_kernel_is_within_its_bounds(compiled: dict[str, Kernels], case: str) -> None:
    outside_loops = FEW_BYTES if "decode" in case else 0
    assert faults_of(case, compiled[case], outside_loops) == []


def test_exact_prefill_and_decode_multiply_with_the_same_instructions(compiled: dict[str, Kernels]) -> None:
    shapes: dict[int, dict[str, set[str]]] = {}
    for variant in filter(lambda variant: variant.exact, (*covering(), *LARGE)):
        found = shapes.setdefault(variant.head_dim, {}).setdefault(variant.family, set())
        found.update(compiled[str(variant)][-1]["products"])
    assert len(shapes) == 5
    for head_dim, families in shapes.items():
        assert families["prefill"] == families["decode"] != set(), head_dim


def test_gate_and_up_multiplies_as_exact_mode_does_in_tiles_of_64_rows(compiled: dict[str, Kernels]) -> None:
    for tile in DISTINCT_TILES:
        (kernel,) = compiled[f"gate and up, {tile}"]
        assert bool(kernel["wgmma"]) == (tile.rows >= WARP_GROUP_ROWS), tile


def test_what_is_compiled_here_leaves_out_no_two_values_that_might_not_go_together() -> None:
    names = [field.name for field in fields(Attention) if field.name not in ("softcap", "sinks")]
    for one, other in combinations(names, 2):
        values = [{getattr(variant, name) for variant in every()} for name in (one, other)]
        pairs = {(getattr(variant, one), getattr(variant, other)) for variant in covering()}
        assert pairs == set(product(*values)), (one, other)


def test_the_bounds_can_be_broken() -> None:
    good = {
        "name": "k",
        "stack": 0,
        "shared": SHARED_MEMORY,
        "wgmma": 1,
        "mma": 1,
        "contracts": False,
        "async_copies": 1,
        "programs_per_sm": 4,
    }
    decode, prefill = USUAL
    linear, smaller = "exact linear 64 rows", str(Attention("prefill", 256, "fp8", exact=True))
    assert [faults_of(case, [good]) for case in (decode, prefill, linear, smaller)] == [[], [], [], []]
    assert faults_of(decode, [{**good, "stack": 8}], allowed_stack=8) == []
    for case, field, value in (
        (decode, "stack", 8),
        (decode, "shared", SHARED_MEMORY + 1),
        (decode, "mma", 0),
        (decode, "async_copies", 0),
        (decode, "programs_per_sm", 2),
        (prefill, "wgmma", 0),
        (prefill, "programs_per_sm", 0),
        (str(Attention("decode", 128, exact=True)), "wgmma", 0),
        (str(Attention("decode", 128, exact=True)), "contracts", True),
        (linear, "wgmma", 0),
        (smaller, "mma", 0),
    ):
        assert len(faults_of(case, [{**good, field: value}])) == 1, (case, field)
