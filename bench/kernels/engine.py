"""Decode and prefill time of the engine alone, beside what the machine could do at best.

    python -m splitserve.bench.kernels.engine [--models 125m,500m] [--dtypes bfloat16,float32] [--exact] \\
        [--quantizations none,int8,int4] [--longest 2048] [--json FILE]

The floors are measured in the same run, on the same core: a decode step cannot read the weights as the model
has them, and the batch's KV cache, faster than a plain sum reads memory from huge pages (coded weights, see
kernels/cpu/coded.h, are fewer bytes, so one row may pass its floor); a prefill cannot be faster than its
multiply-adds at the rate of a large square matrix product. (On a CPU without bfloat16 instructions both
dtypes multiply at the rate of float32.) Beside each step stands what its matrix products
take alone. The models are random: the time does not depend on the weights. The last row is a decode step of a
model so small that its kernels take next to nothing: what Python spends on a step. Times are this thread's
processor time, the best of several runs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from ...engine.engine_config import EngineConfig
from ...engine.model.weight_sizes import QUANTISED_BYTES
from ...engine.settings import DType, Quantization, WorkerSettings
from ...engine.step.batch import Batch, SamplingState
from ...engine.step.model_runner import ModelRunner
from ...kernels.huge_pages import huge_page_bytes
from ...kernels.interface import DenseMlp
from ...transport.messages.messages import SamplingParams
from ..environment import environment, option_parser, write_record
from ..models import LLAMA_TINY, SHAPES, make_random_llama

CONTEXT = 1024  # tokens in the cache of each decoding sequence
DECODE_BATCHES = (1, 8, 32)
PREFILLS = ((0, 128), (0, 512), (0, 2048), (448, 64))  # tokens: in the prefix cache, computed
BLOCK_SIZE = 16
OVERHEAD_MS = 0.3


@dataclass(frozen=True)
class Row:
    model: str
    dtype: str
    what: str
    ms: float
    floor_ms: float
    tokens_per_s: float
    products_ms: float = 0.0  # of ms: the linear layers alone

    @property
    def fraction(self) -> float:
        return self.floor_ms / self.ms


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """The fastest of ``repeats`` runs, in seconds of this thread's CPU time: what other processes take is not
    ours."""
    run()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return min(times)


def read_rate() -> float:
    """Bytes a second that one core reads from memory on huge pages."""
    block = read_block()
    return block.nbytes / best_seconds(block.sum, 5)


def read_block() -> torch.Tensor:
    """float32, larger than all caches, on huge pages."""
    return huge_page_bytes(512 << 20).view(torch.float32).fill_(1)


def multiply_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product: in float32, or in ``dtype`` where the CPU
    is faster at that."""
    n = 1024

    def rate(square: torch.Tensor) -> float:
        return 2 * n**3 / best_seconds(lambda: square @ square, 3)

    return max(rate(torch.randn(n, n)), rate(torch.randn(n, n).to(dtype)))


def products_seconds(runner: ModelRunner, rows: int, sampled: int) -> float:
    """Seconds of all linear layers with this many token rows, and of the output layer with ``sampled``."""
    c, model = runner.config, runner._model
    wide = max(c.intermediate_size, c.num_heads * c.head_dim, c.hidden_size)
    x = torch.randn(rows * wide).to(runner.loaded.dtype)
    linears = [
        (linear, x[: rows * size].view(rows, size))
        for layer in (layer.parts for layer in model._layers)
        for linear, size in (
            (layer.qkv, c.hidden_size),
            (layer.o, c.num_heads * c.head_dim),
            *(
                [(layer.mlp.gate_up, c.hidden_size), (layer.mlp.down, c.intermediate_size)]
                if isinstance(layer.mlp, DenseMlp)
                else [(layer.mlp, c.hidden_size)]
            ),
        )
    ]
    linears.append((model._head, x[: sampled * c.hidden_size].view(sampled, c.hidden_size)))

    def run() -> None:
        for linear, inputs in linears:
            linear(inputs)

    with torch.inference_mode():
        return best_seconds(run, 3)


def make_batch(num_seqs: int, start: int, count: int, block_size: int = BLOCK_SIZE) -> Batch:
    """``num_seqs`` sequences with ``start`` tokens in the cache run ``count`` more; each sequence owns its
    blocks."""
    num_blocks = -(-(start + count) // block_size)
    tables = (
        np.random.default_rng(0)
        .permutation(num_seqs * num_blocks)
        .reshape(num_seqs, num_blocks)
        .astype(np.int32)
    )
    positions = np.arange(start, start + count, dtype=np.int32)
    slots = tables[:, positions // block_size].astype(np.int64) * block_size + positions % block_size
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    return Batch(
        token_ids=np.random.default_rng(1).integers(3, 30000, num_seqs * count, dtype=np.int32),
        positions=np.tile(positions, num_seqs),
        query_start_loc=np.arange(0, num_seqs * count + 1, count, dtype=np.int32),
        seq_lens=np.full(num_seqs, start + count, np.int32),
        block_tables=tables,
        slot_mapping=slots.reshape(-1),
        sampling=[SamplingState(greedy, [0] * (start + count), []) for _ in range(num_seqs)],
    )


def measure(model: str, runner: ModelRunner, quantization: str, longest: int) -> list[Row]:
    c, item = runner.config, runner.loaded.dtype.itemsize
    bytes_per_s, flops_per_s = read_rate(), multiply_rate(runner.loaded.dtype)
    layer = c.hidden_size * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size)
    weights, head = c.num_layers * layer, c.vocab_size * c.hidden_size
    kv_token_bytes = runner.kv_cache.layout.block_bytes / BLOCK_SIZE
    dtype = str(runner.loaded.dtype).removeprefix("torch.")
    dtype += f", {quantization}" if quantization != "none" else ""
    num_bytes = weights * QUANTISED_BYTES.get(quantization, item)
    num_bytes += head * (1 if quantization in ("int8", "int4") else item)
    print(
        f"{model} {dtype}: reads {bytes_per_s / 1e9:.1f} GB/s, multiplies {flops_per_s / 1e9:.0f} GFLOP/s, "
        "one thread"
    )
    rows = []

    def add(what: str, seconds: float, floor: float, num_tokens: int, products: float) -> None:
        row = Row(model, dtype, what, seconds * 1e3, floor * 1e3, num_tokens / seconds, products * 1e3)
        rows.append(row)
        print(
            f"  {what:36} {row.ms:8.1f} ms  floor {row.floor_ms:7.1f} ms  {row.fraction:4.0%}  "
            f"products {row.products_ms:7.1f} ms  {row.tokens_per_s:8.0f} tokens/s",
            flush=True,
        )

    for batch in DECODE_BATCHES:
        step = make_batch(batch, CONTEXT - 1, 1)
        repeats = 10 if batch < 32 else 5
        seconds = best_seconds(lambda step=step: runner.execute(step), repeats)  # type: ignore[misc]
        floor = (num_bytes + batch * CONTEXT * kv_token_bytes) / bytes_per_s
        floor = max(floor, 2 * batch * (weights + head) / flops_per_s)
        products = products_seconds(runner, batch, batch)
        add(f"decode, batch {batch}, context {CONTEXT}", seconds, floor, batch, products)
    for cached, tokens in PREFILLS:
        if tokens > longest:
            continue
        step = make_batch(1, cached, tokens)
        seconds = best_seconds(lambda step=step: runner.execute(step), 3)  # type: ignore[misc]
        pairs = tokens * (cached + tokens / 2)
        attention = 4 * c.num_layers * c.num_heads * c.head_dim * pairs
        floor = (2 * tokens * weights + attention + 2 * head) / flops_per_s
        after = f" after {cached} cached" if cached else ""
        add(f"prefill, {tokens} tokens{after}", seconds, floor, tokens, products_seconds(runner, tokens, 1))
    return rows


def measure_overhead(folder: Path) -> Row:
    """A step of 8 sequences through 12 layers of next to nothing, beside the 0.3 ms that it may take."""
    runner = make_runner(folder, "tiny", "float32", exact=False, num_blocks=64)
    step = make_batch(8, 31, 1)
    step.token_ids[:] %= LLAMA_TINY["vocab_size"]
    seconds = best_seconds(lambda: runner.execute(step), 300)
    print(f"tiny: a step of 8 sequences in {seconds * 1e3:.2f} ms")
    return Row(
        "tiny",
        "float32",
        "decode, batch 8, 12 layers of next to nothing",
        seconds * 1e3,
        OVERHEAD_MS,
        8 / seconds,
    )


def make_runner(
    folder: Path, model: str, dtype: DType, exact: bool, num_blocks: int, quantization: Quantization = "none"
) -> ModelRunner:
    if not (folder / model).exists():
        make_random_llama(folder / model, **SHAPES[model])
    settings = WorkerSettings(
        model=folder / model,
        insecure=True,
        device="cpu",
        dtype=dtype,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=min(4096, num_blocks * 16),
        exact=exact,
        quantization=quantization,
    )
    runner = ModelRunner(EngineConfig(settings))
    runner.warm_up()
    runner.kv_cache.pool.normal_()
    return runner


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--models", default="125m,500m", help="of bench/models.py, separated by commas")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="separated by commas")
    parser.add_argument("--quantizations", default="none", help="separated by commas")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest prompt")
    parser.add_argument("--exact", action="store_true", help="batch-invariant mode")
    options = parser.parse_args()
    num_blocks = max(DECODE_BATCHES) * CONTEXT // BLOCK_SIZE
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models.split(","):
            for dtype, scheme in product(options.dtypes.split(","), options.quantizations.split(",")):
                runner = make_runner(Path(folder), model, dtype, options.exact, num_blocks, scheme)
                rows += measure(model, runner, scheme, options.longest)
        rows.append(measure_overhead(Path(folder)))
    write_record(options.json, {"environment": environment(), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
