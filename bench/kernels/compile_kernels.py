"""Compiles the GPU's kernels for sm_90 in the shapes of real models, on a machine without a GPU, and prints
what became of them: a line of JSON for each case.

python -m splitserve.bench.kernels.compile_kernels [name of a case ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...engine.step.decode_graphs import BUCKETS
from ...kernels.gpu.block_checksum import block_checksums
from ...kernels.gpu.block_copy import pack_blocks, unpack_blocks
from ...kernels.gpu.decode_attention import decode_attention
from ...kernels.gpu.decode_plan import plan_decode
from ...kernels.gpu.elementwise import embedding, gate_mul
from ...kernels.gpu.exact_linear import ExactLinear, product_tile
from ...kernels.gpu.expert_tiles import ExpertTiles
from ...kernels.gpu.fp8_linear import quantize_rows
from ...kernels.gpu.gumbel_argmax import gumbel_argmax
from ...kernels.gpu.latent_attention import latent_attention
from ...kernels.gpu.mixture import grouped_product, route, weighted_sum
from ...kernels.gpu.norm import add_rms_norm
from ...kernels.gpu.prefill_attention import plan_prefill, prefill_attention
from ...kernels.gpu.quantised_experts import QuantisedExperts
from ...kernels.gpu.quantised_linear import QuantisedLinear, quantised_tile
from ...kernels.gpu.rope_store import rope_and_store
from ...kernels.gpu.sampling import SamplingRows, sample
from ...kernels.gpu.step_inputs import advance
from ...kernels.gpu.token_masks import forbid
from ...kernels.interface import AttentionInputs, RopeInputs
from ...kernels.mixture_shape import MixtureShape
from ..models import LLAMA_500M
from . import sm90
from .attention_variants import VARIANTS, Attention
from .engine_figures import MODELS
from .kernel_inputs import QUANTISED, quantised_weight

BFLOAT16, FLOAT16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NUM_SEQS, MANY_SEQS, MAX_BLOCKS = 64, 65, 64


def empty(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def attention(variant: Attention, num_kv_heads: int = 8, num_seqs: int = NUM_SEQS) -> None:
    """Its plan and itself."""
    head_dim, group, block_size = variant.head_dim, variant.group, variant.block_size
    num_heads = group * num_kv_heads
    pool, scales = _pool(head_dim, num_kv_heads, block_size, variant.cache_dtype)
    starts, lens, tables = (
        empty(*shape, dtype=torch.int32) for shape in ((num_seqs + 1,), (num_seqs,), (num_seqs, MAX_BLOCKS))
    )
    window = 1000 if variant.window else None
    sinks = empty(num_heads, dtype=torch.float32) if variant.sinks else None
    inputs = AttentionInputs(starts, lens, tables, 0.1, window, variant.softcap, scales, sinks=sinks)
    num_tokens = num_seqs if variant.family == "decode" else 1024
    q = empty(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=variant.dtype)[:, :num_heads]
    out = empty(num_tokens, num_heads * head_dim, dtype=variant.dtype)
    if variant.family == "decode":
        plan = plan_decode(inputs, num_heads, num_kv_heads, head_dim, block_size)
        decode_attention(out, q, pool, 1, inputs, plan, 3 * sm90.NUM_SMS, variant.tile, variant.exact)
    else:
        tiles = plan_prefill(inputs, num_tokens, group, variant.tile, singles=True)
        prefill_attention(out, q, pool, 1, inputs, tiles, variant.exact)


def norm(hidden: int, dtype: torch.dtype = BFLOAT16) -> None:
    x, residual = (empty(8, hidden, dtype=dtype) for _ in range(2))
    add_rms_norm(x, residual, empty(hidden, dtype=dtype), 1e-5)


def rope(
    head_dim: int, cache_dtype: torch.dtype = BFLOAT16, dtype: torch.dtype = BFLOAT16, norm: int = 1,
    heads: int = 32, kv_heads: int = 8,
) -> None:  # fmt: skip
    """``norm``: dimensions of the norms' weights; 0: there are none."""
    pool, scales = _pool(head_dim, kv_heads, 64, cache_dtype)
    positions, slots, cos_sin = (
        empty(8, dtype=torch.int32),
        empty(8, dtype=torch.int64),
        empty(64, head_dim, dtype=torch.float32),
    )
    q, k = (empty(*[n] * (norm - 1), head_dim, dtype=dtype) if norm else None for n in (heads, kv_heads))
    inputs = RopeInputs(positions, slots, cos_sin, heads, kv_heads, head_dim, q, k, 1e-6, scales)
    rope_and_store(empty(8, (heads + 2 * kv_heads) * head_dim, dtype=dtype), pool, 1, inputs)


def exact_linear(
    num_tokens: int, in_features: int = 4096, dtype: torch.dtype = BFLOAT16, bias: bool = False
) -> None:
    weight = empty(6144, in_features, dtype=dtype)
    ExactLinear(weight, empty(6144, dtype=dtype) if bias else None)(
        empty(num_tokens, in_features, dtype=dtype)
    )


def latent(num_tokens: int, dtype: torch.dtype = BFLOAT16, heads: int = 128) -> None:
    """Attention with the sizes of DeepSeek-V3, for 64 sequences."""
    starts, lens, tables = (
        empty(*shape, dtype=torch.int32) for shape in ((NUM_SEQS + 1,), (NUM_SEQS,), (NUM_SEQS, MAX_BLOCKS))
    )
    q, pool = empty(num_tokens, heads, 576, dtype=dtype), empty(4, 2, 1, 1, 64, 576, dtype=dtype)
    latent_attention(q, pool, 1, AttentionInputs(starts, lens, tables, 0.1), sm90.NUM_SMS, exact=False)


def latent_rope() -> None:
    ints, slots = empty(8, dtype=torch.int32), empty(8, dtype=torch.int64)
    inputs = RopeInputs(ints, slots, empty(64, 576, dtype=torch.float32), 128, 1, 576)
    rope_and_store(empty(8, 129 * 576), empty(4, 2, 1, 1, 64, 576), 1, inputs)


def quantised_linear(form: str, num_tokens: int, dtype: torch.dtype = BFLOAT16) -> None:
    """And, of inputs that are rounded, their rounding."""
    weight = quantised_weight(512, 4096, **QUANTISED[form])
    QuantisedLinear(weight, empty(512, dtype=dtype), num_sms=sm90.NUM_SMS)(
        empty(num_tokens, 4096, dtype=dtype)
    )


def mixture(num_tokens: int, dtype: torch.dtype = BFLOAT16) -> None:
    """Its routes, both products and its sum; as in Qwen3-30B-A3B."""
    shape = MixtureShape(128, 8, 2048, 768, normalized=True, activation="silu")
    logits, x = empty(num_tokens, 128, dtype=dtype), empty(num_tokens, 2048, dtype=dtype)
    experts, weights = route(logits, shape)
    tile = product_tile(experts.numel())
    ints = empty(129, dtype=torch.int32)
    tiles = ExpertTiles(empty(8 * num_tokens, dtype=torch.int64), ints, ints[1:].clone())
    gate_up = grouped_product(x, empty(128, 1536, 2048, dtype=dtype), None, tiles, tile, 8, sorted_rows=False)
    down = empty(128, 2048, 768, dtype=dtype)
    parts = grouped_product(gate_up[:, :768].clone(), down, None, tiles, tile, 8, sorted_rows=True)
    weighted_sum(parts, weights, None, logits)


def quantised_experts(form: str, num_tokens: int, dtype: torch.dtype = BFLOAT16) -> None:
    """Both products of 32 experts, 4 a token."""
    count = 4 * num_tokens
    ints, tile = empty(33, dtype=torch.int32), quantised_tile(count)
    tiles = ExpertTiles(empty(count, dtype=torch.int64), ints, ints[1:].clone())
    for x_rows, last in ((num_tokens, False), (count, True)):
        matrix = quantised_weight(64, 2880 if last else 4096, **QUANTISED[form])
        experts = QuantisedExperts.of([matrix] * 32, empty(32, 64, dtype=dtype))
        assert experts is not None
        experts(empty(x_rows, matrix.in_features, dtype=dtype), tiles, tile, 4, sorted_rows=last)


def sampling(n: int = 8, vocab_size: int = 151936, edited: bool = True, filtered: bool = True) -> None:
    ints, floats = empty(n, dtype=torch.int32), empty(n, dtype=torch.float32)
    rows = SamplingRows(
        empty(n, dtype=torch.int64), ints, floats, ints, floats, floats, floats, floats, floats, ints,
        empty(n, vocab_size, dtype=torch.int32), empty(n + 1, dtype=torch.int32), ints, ints, floats,
        edited=edited, filtered=filtered,
    )  # fmt: skip
    sample(empty(n, vocab_size, dtype=torch.float32), rows)


def step_inputs(num_rows: int, max_blocks: int = 2049) -> None:
    words, slots = empty(num_rows, dtype=torch.int32), empty(num_rows, dtype=torch.int64)
    packed = empty(4 + 3 * num_rows + 2 * num_rows * max_blocks, dtype=torch.int32)
    tables = empty(num_rows, max_blocks, dtype=torch.int32)
    advance(packed, words, words, words, words, words, slots, tables, num_rows, 64)


def start_of(shape: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """What a worker compiles when it starts with a model of this config.json in bfloat16."""
    hidden, vocab_size = shape["hidden_size"], shape["vocab_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim, group = shape.get("head_dim", hidden // heads), heads // kv_heads
    norms = int("Qwen3ForCausalLM" in shape.get("architectures", ()))
    block = shape["num_hidden_layers"] * kv_heads * head_dim * 256  # bytes of 64 keys and values in 16 bits
    return {
        "embedding": lambda: embedding(empty(vocab_size, hidden), empty(8, dtype=torch.int32), BFLOAT16),
        "norm": lambda: norm(hidden),
        "rope": lambda: rope(head_dim, norm=norms, heads=heads, kv_heads=kv_heads),
        "gate": lambda: gate_mul(empty(8, 2 * shape["intermediate_size"]), "silu"),
        **{
            f"{family}, {num_seqs} sequences": partial(
                attention, Attention(family, head_dim, group=group), kv_heads, num_seqs
            )
            for family, num_seqs in product(("decode", "prefill"), (NUM_SEQS, MANY_SEQS))
        },
        **{
            f"sampling, {edited}, {filtered}": partial(sampling, 8, vocab_size, edited, filtered)
            for edited, filtered in product((False, True), repeat=2)
        },
        "token masks": lambda: forbid(
            empty(8, vocab_size, dtype=torch.float32), empty(2, 1 + -(-vocab_size // 32), dtype=torch.int32)
        ),
        "checksums": lambda: block_checksums(*block_bytes(block)),
        "pack": lambda: pack_blocks(*block_bytes(block), empty(2, block, dtype=torch.uint8)),
        "unpack": lambda: unpack_blocks(empty(2, block, dtype=torch.uint8), *block_bytes(block)[::-1]),
    }


def block_bytes(num_bytes: int = 1 << 20) -> tuple[Tensor, Tensor]:
    return empty(4, num_bytes, dtype=torch.uint8), empty(2, dtype=torch.int64)


def _pool(
    head_dim: int, num_kv_heads: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    scales = empty(2, 2, num_kv_heads, dtype=torch.float32) if dtype == FP8 else None
    return empty(4, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype), scales


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
    "gumbel_argmax": lambda: gumbel_argmax(
        empty(8, 151936, dtype=torch.float32), empty(8, 2, dtype=torch.int64)
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
    "experts, 1 row": lambda: mixture(1),
    "experts, 64 rows": lambda: mixture(64),
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
        for rows in (1, 1024)
    },
    "quantize rows": lambda: quantize_rows(empty(64, 14336)),
    "quantize rows float16": lambda: quantize_rows(empty(64, 4096, dtype=FLOAT16)),
    "pack": lambda: pack_blocks(*block_bytes(), empty(2, 1 << 19, dtype=torch.uint8), 4096),
    "checksum": lambda: block_checksums(*block_bytes()),
}


STARTED: dict[str, Callable[[], object]] = {
    f"start of {name}: {part}": call
    for name, shape in (MODELS | {"0.5B": LLAMA_500M}).items()
    for part, call in start_of(shape).items()
}
STARTED |= {f"start of any: {num_rows} rows": partial(step_inputs, num_rows) for num_rows in BUCKETS}
CASES = STARTED | OTHERS


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
