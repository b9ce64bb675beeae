"""Matrix products and attention of one thread on this CPU: each instruction set of the C++ kernels, and oneDNN.

    python -m splitserve.bench.kernels.cpu_products [--models 125m,500m] [--json FILE]

All linear layers of a model in bfloat16, by number of rows, and its attention. The floor is the machine's,
whatever the kernel: reading the weights (or keys and values) once at the rate of a plain sum over huge pages; or
the multiply-adds at the rate of torch's large square product of float32 or bfloat16, whichever is faster, if that
takes longer. The kernels take turns; times are this thread's processor time, the best of ROUNDS.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...kernels import _cpu
from ...kernels.huge_pages import huge_page_bytes
from ...kernels.interface import AttentionInputs, Kernels, Linear
from ...kernels.measured_choice import KernelChoices
from ...kernels.native_cpu import NativeCpuKernels, OneDnnLinear, measured_instruction_set
from ...kernels.select import cpu_multiplies_bfloat16
from ..environment import environment
from ..models import SHAPES
from .engine import multiply_rate, read_rate

ROWS = (1, 4, 8, 16, 32, 128, 512)
ROUNDS = 4
ATTENTION = ((32, 1024, 1), (1, 512, 512), (1, 2048, 2048))  # sequences, tokens in the cache, queries of each
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Row:
    kernel: str
    what: str
    ms: float
    gflops: float
    gbytes: float
    share: float  # floor / time


@dataclass(frozen=True)
class Candidate:
    """One way to multiply: ``use`` goes before its calls."""

    name: str
    use: Callable[[], object]
    linear: Callable[[torch.Tensor], Linear]
    kernels: Kernels | None


def candidates() -> list[Candidate]:
    found = []
    for name in _cpu.instruction_sets():
        if name == "generic":
            continue
        kernels = NativeCpuKernels(1, name)
        found.append(
            Candidate(
                name,
                lambda name=name: _cpu.use_instruction_set(name),  # type: ignore[misc]
                lambda weight, kernels=kernels: kernels.linear(weight, None),  # type: ignore[misc]
                kernels,
            )
        )
    if cpu_multiplies_bfloat16():
        found.append(Candidate("onednn", lambda: None, lambda weight: OneDnnLinear(weight, None), None))
    return found


def best_in_turn(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each run: the fastest of ``ROUNDS``, in which they take turns."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def calls(
    candidate: Candidate, linears: Sequence[Linear], inputs: Sequence[torch.Tensor]
) -> Callable[[], None]:
    def run() -> None:
        candidate.use()
        for linear, x in zip(linears, inputs, strict=True):
            linear(x)

    return run


def measure_products(model: str, kernels: Sequence[Candidate], rate: float, peak: float) -> list[Row]:
    c: Mapping[str, Any] = SHAPES[model]
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim", hidden // heads)
    layer = [
        ((heads + 2 * c["num_key_value_heads"]) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * c["intermediate_size"], hidden),
        (hidden, c["intermediate_size"]),
    ]
    shapes = layer * c["num_hidden_layers"]
    linears: dict[str, list[Linear]] = {}
    for candidate in kernels:
        candidate.use()
        linears[candidate.name] = [candidate.linear(torch.randn(shape).bfloat16()) for shape in shapes]
    weights, rows = sum(n * k for n, k in shapes), []
    for m in ROWS:
        inputs = [torch.randn(m, k).bfloat16() for _, k in shapes]
        runs = {each.name: calls(each, linears[each.name], inputs) for each in kernels}
        for name, seconds in best_in_turn(runs).items():
            floor = max(2 * weights / rate, 2 * m * weights / peak)
            gflops, gbytes = 2 * m * weights / seconds / 1e9, 2 * weights / seconds / 1e9
            rows.append(
                Row(name, f"{model}: all linears, {m} rows", seconds * 1e3, gflops, gbytes, floor / seconds)
            )
    return rows


def measure_attention(model: str, kernels: Sequence[Candidate], rate: float, peak: float) -> list[Row]:
    c: Mapping[str, Any] = SHAPES[model]
    heads, kv_heads, layers = c["num_attention_heads"], c["num_key_value_heads"], c["num_hidden_layers"]
    head_dim = c.get("head_dim", c["hidden_size"] // heads)
    shape = (max(b * -(-t // BLOCK_SIZE) for b, t, _ in ATTENTION), layers, 2, BLOCK_SIZE, kv_heads, head_dim)
    pool = huge_page_bytes(2 * torch.Size(shape).numel()).view(torch.bfloat16).view(shape).normal_()
    rows = []
    for batch, length, queries in ATTENTION:
        blocks = -(-length // BLOCK_SIZE)
        inputs = AttentionInputs(
            torch.arange(0, batch * queries + 1, queries, dtype=torch.int32),
            torch.full((batch,), length, dtype=torch.int32),
            torch.randperm(batch * blocks).view(batch, blocks).int(),
            head_dim**-0.5,
        )
        q = torch.randn(batch * queries, heads, head_dim).bfloat16()

        def attend(candidate: Candidate, q: torch.Tensor = q, inputs: AttentionInputs = inputs) -> None:
            candidate.use()
            assert candidate.kernels is not None
            for layer in range(layers):
                candidate.kernels.paged_attention(q, pool, layer, inputs)

        runs = {each.name: (lambda each=each: attend(each)) for each in kernels if each.kernels is not None}
        num_bytes = batch * length * layers * 2 * kv_heads * head_dim * 2
        flops = 4 * layers * heads * head_dim * batch * queries * (length - (queries - 1) / 2)
        for name, seconds in best_in_turn(runs).items():
            floor = max(num_bytes / rate, flops / peak)
            what = f"{model}: attention, {batch} x {queries} queries, context {length}"
            rows.append(
                Row(
                    name,
                    what,
                    seconds * 1e3,
                    flops / seconds / 1e9,
                    num_bytes / seconds / 1e9,
                    floor / seconds,
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="125m,500m", help="of bench/models.py, separated by commas")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels, rows = candidates(), []
    with torch.inference_mode():
        rate, peak = read_rate(), multiply_rate(torch.bfloat16)
        for model in options.models.split(","):
            rows += measure_products(model, kernels, rate, peak)
            rows += measure_attention(model, kernels, rate, peak)
    chosen = measured_instruction_set(KernelChoices.of_this_machine())
    print(f"reads {rate / 1e9:.1f} GB/s; multiplies {peak / 1e9:.0f} GFLOP/s; chosen here: {chosen}")
    for row in rows:
        print(
            f"{row.what:52} {row.kernel:12} {row.ms:8.1f} ms {row.gflops:7.1f} GFLOP/s {row.gbytes:5.1f} GB/s "
            f"{row.share:5.0%} of the floor"
        )
    if options.json:
        machine = {"read_bytes_per_s": rate, "flops_per_s": peak, "chosen": chosen}
        record = {"environment": environment(), **machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
