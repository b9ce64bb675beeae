"""Compiles the GPU's kernels for sm_90 in the shapes of real models, on a machine without a GPU, and prints
what became of them: a line of JSON for each case.

python -m splitserve.bench.kernels.compile_kernels [name of a case ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

import torch

from ...kernels.gpu.elementwise import embedding, gate_fp8, gate_mul
from ...kernels.gpu.fp8_rows import fp8_rows
from ...kernels.gpu.kv_blocks import block_checksums, pack_blocks
from ...kernels.gpu.norm import norm_fp8
from ...kernels.gpu.token_masks import forbid
from . import sm90
from .attention_variants import VARIANTS
from .gate_up import DISTINCT_TILES
from .kernel_calls import (
    BFLOAT16,
    FLOAT16,
    FP8,
    attention,
    block_bytes,
    empty,
    exact_linear,
    gate_and_up,
    gated_delta_net,
    gated_short_conv,
    latent,
    latent_rope,
    low_rank,
    measured_quantised,
    mixture,
    norm,
    part_of_mixture,
    quantised_experts,
    quantised_linear,
    rope,
    sampling,
    step_inputs,
)
from .kernel_figures import LINEARS, QUANTISED_FORMS, RANK, UPDATED
from .kernel_inputs import QUANTISED
from .start_kernels import STARTED

OTHERS: dict[str, Callable[[], object]] = {
    "norm 4096": lambda: norm(4096),
    "norm 2560": lambda: norm(2560),
    "norm 896 float16": lambda: norm(896, FLOAT16),
    "rope 64 float16": lambda: rope(64, FLOAT16, FLOAT16, norm=0),
    "rope 96 fp8": lambda: rope(96, FP8, norm=0),
    "rope 128, norms of each": lambda: rope(128, norm=2),
    "rope 128": lambda: rope(128),
    "rope 128 fp8": lambda: rope(128, FP8),
    "rope 256 fp8 float16": lambda: rope(256, FP8, FLOAT16),
    "rope 512": lambda: rope(512, heads=16, kv_heads=2),
    "rope 576 latent": latent_rope,
    "latent decode": lambda: latent(64),
    "latent decode float16": lambda: latent(64, FLOAT16),
    "latent, 16 heads": lambda: latent(1024, heads=16),
    "latent prefill": lambda: latent(1024),
    "silu_mul": lambda: gate_mul(empty(8, 28672), "silu"),
    "gelu_mul": lambda: gate_mul(empty(8, 2 * 6912), "gelu_tanh"),
    "silu_mul float16": lambda: gate_mul(empty(8, 2 * 4864, dtype=FLOAT16), "silu"),
    "embedding": lambda: embedding(empty(1000, 4096), empty(8, dtype=torch.int32), BFLOAT16),
    "embedding float16": lambda: embedding(
        empty(1000, 896, dtype=FLOAT16), empty(8, dtype=torch.int32), FLOAT16
    ),
    "sampling": sampling,
    "step inputs": lambda: step_inputs(256),
    "token masks": lambda: forbid(
        empty(8, 151936, dtype=torch.float32), empty(2, 1 + 4748, dtype=torch.int32)
    ),
    "exact linear 64 rows": lambda: exact_linear(64),
    "exact linear 64 rows float16": lambda: exact_linear(64, dtype=FLOAT16),
    "exact linear 64 of 1000": lambda: exact_linear(64, 1000),
    "exact linear 512 rows": lambda: exact_linear(512),
    "exact linear 512 rows float16": lambda: exact_linear(512, dtype=FLOAT16, bias=True),
    "exact linear 4096 rows": lambda: exact_linear(4096, bias=True),
    "exact linear 4096 of 1000": lambda: exact_linear(4096, 1000),
    "low rank, 48 of 4096": lambda: low_rank(4096, 6144, 48),
    "low rank, 16 of 14336": lambda: low_rank(14336, 4096, 16),
    "low rank, 512 of 1000 float16": lambda: low_rank(1000, 1000, 512, FLOAT16),
    "low rank, 16 of 512 float32": lambda: low_rank(512, 512, 16, torch.float32),
    "gated delta net, decode": lambda: gated_delta_net(8, 8),
    "gated delta net, prefill float16": lambda: gated_delta_net(2, 512, FLOAT16),
    "Mamba-2, decode": lambda: gated_delta_net(8, 8, mamba=True),
    "Mamba-2, prefill": lambda: gated_delta_net(2, 512, mamba=True),
    "short convolution": lambda: gated_short_conv(2, 512, bias=True),
    "experts, 1 row": lambda: mixture(1),
    "experts, 64 rows": lambda: mixture(64),
    "32 of 128 experts, 64 rows": lambda: part_of_mixture(64),
    "experts, 1024 rows float16": lambda: mixture(1024, FLOAT16),
    **{
        f"quantised {form}, {rows} rows": partial(quantised_linear, form, rows)
        for form in QUANTISED
        for rows in (1, 64, 512, 4096)
    },
    **{
        f"quantised {form}, {rows} rows float16": partial(quantised_linear, form, rows, FLOAT16)
        for form in ("int4", "GPTQ of 4 bits", "int8")
        for rows in (1, 4096)
    },
    **{
        f"experts in {form}, {rows} rows": partial(quantised_experts, form, rows)
        for form in ("int4", "GPTQ of 4 bits", "float8 in blocks", "W8A8", "MXFP4")
        for rows in (1, 64, 1024)
    },
    **{f"gate and up, {tile}": partial(gate_and_up, tile) for tile in DISTINCT_TILES},
    "float8 rows": lambda: fp8_rows(empty(64, 14336)),
    "float8 rows float16": lambda: fp8_rows(empty(64, 4096, dtype=FLOAT16)),
    "float8 rows of a norm": lambda: norm_fp8(empty(8, 8192), empty(8, 8192), empty(8192), 1e-5),
    "float8 rows of a gate": lambda: gate_fp8(empty(8, 2 * 28672), "silu"),
    "pack": lambda: pack_blocks(*block_bytes(), empty(2, 1 << 19, dtype=torch.uint8), 4096),
    "checksum": lambda: block_checksums(*block_bytes()),
}


MEASURED: dict[str, Callable[[], object]] = {
    **{
        f"measured exact linear {n} x {k}, {rows} rows": partial(exact_linear, rows, k, out_features=n)
        for _, n, k in LINEARS
        for rows in (1, 256, 4096)
    },
    **{
        f"measured low rank {name}": partial(low_rank, k, sum(outputs), RANK * len(outputs))
        for name, outputs, k in UPDATED
    },
    **{f"measured {form}": partial(measured_quantised, form) for form in QUANTISED_FORMS},
}
"""What gpu_check's part "linears" times, and would else spend its time on."""
CASES = STARTED | OTHERS | MEASURED


def compile_case(name: str) -> list[sm90.Compiled]:
    """Its kernels, in the order of their launches."""
    with sm90.compiling() as kernels:
        if name in CASES:
            CASES[name]()
        else:
            attention(VARIANTS[name])
    return kernels


if __name__ == "__main__":
    for case in sys.argv[1:] or (*OTHERS, *VARIANTS):
        found = [kernel.as_json() for kernel in compile_case(case)]
        print(json.dumps({"case": case, "kernels": found}), flush=True)
