"""Compiles the GPU's kernels for sm_90 in the shapes of real models, on a machine without a GPU, and prints what became of them as JSON.

python -m splitserve.bench.compile_kernels [name of a case ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.gpu.attention_tiles import TileShape
from ..kernels.gpu.block_checksum import block_checksums
from ..kernels.gpu.block_copy import pack_blocks
from ..kernels.gpu.decode_attention import decode_attention, decode_tile, plan_decode
from ..kernels.gpu.elementwise import embedding, silu_mul
from ..kernels.gpu.exact_linear import ExactLinear
from ..kernels.gpu.fp8_linear import quantize_rows
from ..kernels.gpu.gumbel_argmax import gumbel_argmax
from ..kernels.gpu.norm import add_rms_norm
from ..kernels.gpu.prefill_attention import exact_tile, plan_prefill, prefill_attention, prefill_tile
from ..kernels.gpu.rope_store import rope_and_store
from ..kernels.gpu.sampling import SamplingRows, sample
from ..kernels.interface import AttentionInputs, RopeInputs
from . import sm90

BFLOAT16, FLOAT16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NUM_SEQS, MAX_BLOCKS = 64, 64


def empty(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def decode(
    head_dim: int, group: int = 4, num_kv_heads: int = 8, block_size: int = 64, dtype: torch.dtype = BFLOAT16, options: bool = False,
    tile: TileShape | None = None,
) -> None:  # fmt: skip
    num_heads = group * num_kv_heads
    pool, scales = _pool(head_dim, num_kv_heads, block_size, dtype)
    inputs = _inputs(scales, options)
    plan = plan_decode(inputs, num_heads, num_kv_heads, head_dim, block_size)
    computed = BFLOAT16 if dtype == FP8 else dtype
    q = empty(NUM_SEQS, num_heads + 2 * num_kv_heads, head_dim, dtype=computed)[:, :num_heads]
    out = empty(NUM_SEQS, num_heads * head_dim, dtype=computed)
    decode_attention(out, q, pool, 1, inputs, plan, 3 * sm90.NUM_SMS, tile or decode_tile(head_dim, group))


def prefill(
    head_dim: int, group: int = 4, num_kv_heads: int = 8, block_size: int = 64, dtype: torch.dtype = BFLOAT16, options: bool = False,
    exact: bool = False,
) -> None:  # fmt: skip
    num_heads = group * num_kv_heads
    pool, scales = _pool(head_dim, num_kv_heads, block_size, dtype)
    inputs = _inputs(scales, options)
    plan = plan_prefill(inputs, 1024, group, exact_tile(head_dim) if exact else prefill_tile(head_dim), singles=True)
    computed = BFLOAT16 if dtype == FP8 else dtype
    q = empty(1024, num_heads + 2 * num_kv_heads, head_dim, dtype=computed)[:, :num_heads]
    prefill_attention(empty(1024, num_heads * head_dim, dtype=computed), q, pool, 1, inputs, plan, exact)


def _inputs(scales: Tensor | None, options: bool) -> AttentionInputs:
    starts, lens, tables = (empty(*shape, dtype=torch.int32) for shape in ((NUM_SEQS + 1,), (NUM_SEQS,), (NUM_SEQS, MAX_BLOCKS)))
    window, softcap = (1000, 30.0) if options else (None, None)
    return AttentionInputs(starts, lens, tables, 0.1, window, softcap, scales)


def norm(hidden: int) -> None:
    add_rms_norm(empty(8, hidden), empty(8, hidden), empty(hidden), 1e-5)


def rope(head_dim: int, dtype: torch.dtype = BFLOAT16) -> None:
    pool, scales = _pool(head_dim, 8, 64, dtype)
    positions, slots, cos_sin = empty(8, dtype=torch.int32), empty(8, dtype=torch.int64), empty(64, head_dim, dtype=torch.float32)
    q_norm = empty(head_dim)
    inputs = RopeInputs(positions, slots, cos_sin, 32, 8, head_dim, q_norm, q_norm, 1e-6, scales)
    rope_and_store(empty(8, 48 * head_dim), pool, 1, inputs)


def sampling(n: int = 8, vocab_size: int = 151936) -> None:
    ints, floats = empty(n, dtype=torch.int32), empty(n, dtype=torch.float32)
    rows = SamplingRows(
        empty(n, dtype=torch.int64), ints, floats, ints, floats, floats, floats, floats, floats, ints,
        empty(n, vocab_size, dtype=torch.int32), empty(n + 1, dtype=torch.int32), ints, ints, floats, edited=True, filtered=True,
    )  # fmt: skip
    sample(empty(n, vocab_size, dtype=torch.float32), rows)


def block_bytes() -> tuple[Tensor, Tensor]:
    return empty(4, 1 << 20, dtype=torch.uint8), empty(2, dtype=torch.int64)


def _pool(head_dim: int, num_kv_heads: int, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    scales = empty(2, 2, num_kv_heads, dtype=torch.float32) if dtype == FP8 else None
    return empty(4, 2, 2, block_size, num_kv_heads, head_dim, dtype=dtype), scales


CASES: dict[str, Callable[[], object]] = {
    "decode 64": lambda: decode(64),
    "decode 96 options": lambda: decode(96, options=True),
    "decode 128": lambda: decode(128),
    "decode 128 group 7": lambda: decode(128, group=7, num_kv_heads=4),
    "decode 128 block 16": lambda: decode(128, block_size=16),
    "decode 128 float16": lambda: decode(128, dtype=FLOAT16),
    "decode 128 fp8": lambda: decode(128, dtype=FP8),
    "decode 128 options": lambda: decode(128, options=True),
    "decode 256": lambda: decode(256),
    "decode 128 exact": lambda: decode(128, tile=exact_tile(128)),
    "decode 256 exact": lambda: decode(256, tile=exact_tile(256)),
    "prefill 64": lambda: prefill(64),
    "prefill 64 fp8": lambda: prefill(64, dtype=FP8),
    "prefill 96 options": lambda: prefill(96, options=True),
    "prefill 128": lambda: prefill(128),
    "prefill 128 group 7": lambda: prefill(128, group=7, num_kv_heads=4),
    "prefill 128 float16": lambda: prefill(128, dtype=FLOAT16),
    "prefill 128 fp8": lambda: prefill(128, dtype=FP8),
    "prefill 128 options": lambda: prefill(128, options=True),
    "prefill 256": lambda: prefill(256),
    "prefill 128 exact": lambda: prefill(128, exact=True),
    "prefill 256 exact": lambda: prefill(256, exact=True),
    "norm 4096": lambda: norm(4096),
    "norm 2560": lambda: norm(2560),
    "rope 128": lambda: rope(128),
    "rope 128 fp8": lambda: rope(128, FP8),
    "silu_mul": lambda: silu_mul(empty(8, 28672)),
    "embedding": lambda: embedding(empty(1000, 4096), empty(8, dtype=torch.int32), BFLOAT16),
    "gumbel_argmax": lambda: gumbel_argmax(empty(8, 151936, dtype=torch.float32), empty(8, 2, dtype=torch.int64)),
    "sampling": sampling,
    "exact linear 64 rows": lambda: ExactLinear(empty(6144, 4096), None)(empty(64, 4096)),
    "exact linear 512 rows": lambda: ExactLinear(empty(6144, 4096), None)(empty(512, 4096)),
    "exact linear 4096 rows": lambda: ExactLinear(empty(6144, 4096), empty(6144))(empty(4096, 4096)),
    "quantize rows": lambda: quantize_rows(empty(64, 14336)),
    "pack": lambda: pack_blocks(*block_bytes(), empty(2, 1 << 19, dtype=torch.uint8), 4096),
    "checksum": lambda: block_checksums(*block_bytes()),
}


def compile_cases(names: list[str]) -> dict[str, list[sm90.Compiled]]:
    """By case, its kernels in the order of their launches."""
    compiled = {}
    for name in names or CASES:
        with sm90.compiling() as kernels:
            CASES[name]()
        compiled[name] = kernels
    return compiled


if __name__ == "__main__":
    print(json.dumps({name: [kernel.as_json() for kernel in kernels] for name, kernels in compile_cases(sys.argv[1:]).items()}))
