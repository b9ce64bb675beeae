"""What a worker compiles when it starts with one of the models that gpu_check measures: of the one that it
serves, the kernels of exact mode, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from ...engine.step.decode_graphs import BUCKETS
from ...kernels.gpu.elementwise import embedding, gate_fp8, gate_mul
from ...kernels.gpu.fp8_rows import fp8_rows
from ...kernels.gpu.kv_blocks import block_checksums, pack_blocks, unpack_blocks
from ...kernels.gpu.norm import norm_fp8, rms_norm
from ...kernels.gpu.token_masks import forbid
from ..models import LLAMA_500M
from .attention_variants import Attention
from .engine_figures import MODELS
from .kernel_calls import (
    BFLOAT16,
    FP8,
    MANY_SEQS,
    NUM_SEQS,
    attention,
    block_bytes,
    empty,
    exact_linear,
    norm,
    rope,
    sampling,
    step_inputs,
)


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
        "first norm": lambda: rms_norm(empty(8, hidden), empty(hidden), 1e-5),
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


def exact_start_of(shape: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """What it compiles besides in exact mode."""
    hidden, ffn, heads, kv_heads = (
        shape[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = shape.get("head_dim", hidden // heads)
    sizes = {  # outputs and inputs
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * ffn, hidden),
        (hidden, ffn),
        (shape["vocab_size"], hidden),
    }
    return {
        **{
            f"exact {family}, {num_seqs} sequences": partial(
                attention,
                Attention(family, head_dim, exact=True, group=heads // kv_heads),
                kv_heads,
                num_seqs,
            )
            for family, num_seqs in product(("decode", "prefill"), (NUM_SEQS, MANY_SEQS))
        },
        **{
            f"exact {outputs} x {inputs}, {rows} rows": partial(
                exact_linear, rows, inputs, out_features=outputs
            )
            for outputs, inputs in sorted(sizes)
            for rows in (1, 65, 513)
        },
    }


def fp8_start_of(shape: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """What it compiles in place of the same parts where weights and cache are float8."""
    hidden, ffn, heads, kv_heads = (
        shape[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = shape.get("head_dim", hidden // heads)
    return {
        "fp8 norm": lambda: norm_fp8(empty(8, hidden), empty(8, hidden), empty(hidden), 1e-5),
        "fp8 first norm": lambda: norm_fp8(None, empty(8, hidden), empty(hidden), 1e-5),
        "fp8 gate": lambda: gate_fp8(empty(8, 2 * ffn), "silu"),
        "fp8 rows": lambda: fp8_rows(empty(8, heads * head_dim)),
        "fp8 rope": lambda: rope(head_dim, FP8, norm=0, heads=heads, kv_heads=kv_heads),
        **{
            f"fp8 {family}, {num_seqs} sequences": partial(
                attention, Attention(family, head_dim, "fp8", group=heads // kv_heads), kv_heads, num_seqs
            )
            for family, num_seqs in product(("decode", "prefill"), (NUM_SEQS, MANY_SEQS))
        },
    }


STARTED: dict[str, Callable[[], object]] = {
    f"start of {name}: {part}": call
    for name, shape in (MODELS | {"0.5B": LLAMA_500M}).items()
    for part, call in start_of(shape).items()
}
STARTED |= {f"start of 0.5B: {part}": call for part, call in exact_start_of(LLAMA_500M).items()}
STARTED |= {f"start of 0.5B: {part}": call for part, call in fp8_start_of(LLAMA_500M).items()}
STARTED |= {f"start of any: {num_rows} rows": partial(step_inputs, num_rows) for num_rows in BUCKETS}
