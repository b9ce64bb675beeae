"""Attention over a KV cache of 8-bit codes on one CPU thread, beside the same over bfloat16, in turn.

    python -m splitserve.bench.kernels.narrow_cache [--json FILE]

Decode: 8 sequences of 2,048 tokens in 6 layers, more than caches hold. Prefill: the last 256 tokens of 2,048.
Best of several rounds; ``ratio``: bfloat16's time over this one's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from ...kernels.interface import INT8_SCALE_BYTES, AttentionInputs
from ...kernels.measured_choice import KernelChoices
from ...kernels.native_cpu import NativeCpuKernels
from ...kernels.native_linear import measured_instruction_set
from ..environment import environment, option_parser, write_record

HEADS = ((12, 12, 64), (16, 4, 128))  # queries, keys, head_dim
CACHES = ("bfloat16", "fp8", "int8")
BATCH, CONTEXT, CHUNK, LAYERS, BLOCK_SIZE, ROUNDS = 8, 2048, 256, 6, 16, 12


def make_pool(cache: str, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    shape = [BATCH * CONTEXT // BLOCK_SIZE, LAYERS, 2, num_kv_heads, BLOCK_SIZE, head_dim]
    if cache == "bfloat16":
        return torch.randn(shape).bfloat16()
    if cache == "fp8":
        return torch.randn(shape).to(torch.float8_e4m3fn)
    pool = torch.randint(-127, 128, [*shape[:-1], head_dim + INT8_SCALE_BYTES], dtype=torch.int8)
    scales = torch.full((BLOCK_SIZE,), 0.01).view(torch.int8)
    pool[:, :, 0].flatten(3)[..., -len(scales) :] = scales  # keys lie in groups of a block: cpu/kv_codes.h
    pool[:, :, 1, :, :, head_dim:] = scales[:INT8_SCALE_BYTES]
    return pool


def calls(
    kernels: NativeCpuKernels, cache: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> dict[str, Callable[[], None]]:
    pool = make_pool(cache, num_kv_heads, head_dim)
    scales = torch.ones(LAYERS, 2, num_kv_heads) if cache == "fp8" else None
    tables = torch.randperm(len(pool)).int().view(BATCH, -1)

    def attend(num_seqs: int, num_queries: int) -> None:
        inputs = AttentionInputs(
            torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries,
            torch.full((num_seqs,), CONTEXT, dtype=torch.int32),
            tables[:num_seqs],
            scale=head_dim**-0.5,
            kv_scales=scales,
        )
        for layer in range(LAYERS):
            kernels.paged_attention(queries[: num_seqs * num_queries], pool, layer, inputs)

    queries = torch.randn(max(BATCH, CHUNK), num_heads, head_dim).bfloat16()
    return {"decode": partial(attend, BATCH, 1), "prefill": partial(attend, 1, CHUNK)}


def main() -> None:
    options = option_parser(__doc__, to_json=True).parse_args()
    kernels = NativeCpuKernels(1, measured_instruction_set(KernelChoices.of_this_machine()))
    rows = []
    for heads in HEADS:
        by_cache = {cache: calls(kernels, cache, *heads) for cache in CACHES}
        best: dict[tuple[str, str], float] = {}
        for _, what, cache in product(range(ROUNDS), ("decode", "prefill"), CACHES):
            start = time.thread_time()
            by_cache[cache][what]()
            best[what, cache] = min(best.get((what, cache), 1e9), time.thread_time() - start)
        for (what, cache), seconds in best.items():
            ratio = best[what, CACHES[0]] / seconds
            rows.append(
                {"heads": heads, "what": what, "cache": cache, "ms": seconds * 1e3, "ratio": round(ratio, 2)}
            )
            print(f"{heads!s:>14} {what:8} {cache:9} {seconds * 1e3:7.1f} ms {ratio:5.2f}")
    write_record(options.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
