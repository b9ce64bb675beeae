"""The linear layers of one step on one thread of a CPU, with adapters and without.

    python -m splitserve.bench.kernels.low_rank [--models 125m,0.6b] [--json F]

All linears of a model in bfloat16, as its worker multiplies them; with updates of rank 16 for each of a
layer's seven. Decode steps of rows that each have another adapter; a chunk of 512 rows of one. Both ways take
turns; times are this thread's processor time, the best of ROUNDS. ``rate``: steps a second with adapters over
those without. ``read_bytes_per_s``: of a plain sum, the most that adapters can be read at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ...engine.model.config import parse_config
from ...kernels.interface import Linear
from ...kernels.low_rank import LowRank
from ...kernels.select import select_kernels
from ..environment import environment, option_parser, write_record
from .cpu_products import config_of
from .engine import read_block
from .engine_figures import QWEN3_600M

RANK, SLOTS, ROUNDS = 16, 64, 7
LENGTH = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096}
STEPS = {"1 row": (1, 1), "8 rows, 8 adapters": (8, 8), "64 rows, 64 adapters": (64, 64),
         "64 rows, 8 adapters": (64, 8), "512 rows, 1 adapter": (512, 1)}  # fmt: skip


def layers(model: str) -> Iterator[tuple[int, list[int]]]:
    """Inputs, and the outputs of each layer that shares the product, of all products of a model."""
    c = parse_config(QWEN3_600M | LENGTH, {}) if model == "0.6b" else config_of(model)
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for _ in range(c.num_layers):
        yield c.hidden_size, [heads, kv, kv]
        yield heads, [c.hidden_size]
        yield c.hidden_size, [c.intermediate_size] * 2
        yield c.intermediate_size, [c.hidden_size]


def rows_of(model: str) -> Iterator[dict[str, str | float]]:
    device, dtype = torch.device("cpu"), torch.bfloat16
    kernels = select_kernels(device, 1)
    linears: list[tuple[Linear, LowRank]] = []
    for k, outputs in layers(model):
        n, ranks = sum(outputs), RANK * len(outputs)
        updates = kernels.low_rank(k, n, ranks, SLOTS, dtype, device)
        for slot in range(SLOTS):
            blocks = [torch.randn(size, RANK) for size in outputs]
            b: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
            updates.put(slot, torch.randn(ranks, k) / k**0.5, b / RANK**0.5)
        linears.append((kernels.linear(torch.randn(n, k).bfloat16(), None), updates))
    sizes = [k for k, _ in layers(model)]
    num_bytes = sum(2 * RANK * (len(outputs) * k + sum(outputs)) for k, outputs in layers(model))  # of one
    for what, (rows, adapters) in STEPS.items():
        slots = torch.arange(rows, dtype=torch.int32) * adapters // rows
        inputs = [torch.randn(rows, k).bfloat16() for k in sizes]
        best = {False: float("inf"), True: float("inf")}
        for adapted in (False, True) * ROUNDS:
            run = partial(step, linears, inputs, slots if adapted else None)
            best[adapted] = min(best[adapted], seconds(run))
        alone, adapted_ms = (1e3 * best[adapted] for adapted in (False, True))
        rate, bytes_per_s = alone / adapted_ms, adapters * num_bytes / (adapted_ms - alone) * 1e3
        print(f"{model}: {what:21} {alone:6.1f} ms, with adapters {adapted_ms:6.1f}: {rate:.2f}", flush=True)
        yield {
            "model": model, "step": what, "ms": alone, "adapted_ms": adapted_ms, "rate": rate,
            "adapters_bytes_per_s": bytes_per_s,
        }  # fmt: skip


def seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def step(linears: list[tuple[Linear, LowRank]], inputs: list[Tensor], slots: Tensor | None) -> None:
    for (linear, updates), x in zip(linears, inputs, strict=True):
        out = linear(x)
        if slots is not None:
            updates.add(out, x, slots)


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--models", default="125m,0.6b", help="125m, 500m, 0.6b, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        start = environment()
        block = read_block()
        rate = block.nbytes / min(seconds(block.sum) for _ in range(ROUNDS))
        rows = [row for model in options.models.split(",") for row in rows_of(model)]
    write_record(options.json, {"environment": start, "rank": RANK, "read_bytes_per_s": rate, "rows": rows})


if __name__ == "__main__":
    main()
