"""Matrix products and attention of one thread, by each instruction set of the C++ kernels and by oneDNN.

    python -m splitserve.bench.kernels.cpu_products [--models 125m,500m] [--attention | --mixtures] [--json F]

All linear layers of a model in bfloat16, by number of rows, and its attention; or layers of experts in
several forms, whose bytes are those of the experts that the rows choose. The floor is the machine's:
reading weights (or keys and values) once at the rate of a plain sum over huge pages, or the multiply-adds at
the rate of torch's large square product, whichever takes longer. The kernels and that sum take turns; times
are this thread's processor time, the best of ROUNDS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...engine.model.config import ModelConfig, parse_config
from ...kernels import _cpu
from ...kernels.huge_pages import huge_page_bytes
from ...kernels.interface import AttentionInputs, Linear
from ...kernels.mixture_shape import MixtureShape
from ...kernels.mixture_weights import ExpertWeights
from ...kernels.native_cpu import NativeCpuKernels
from ...kernels.native_linear import OneDnnLinear
from ...kernels.quantised import QuantisedWeight
from ...kernels.reference import routes
from ...kernels.select import cpu_multiplies_bfloat16
from ..environment import environment, option_parser, write_record
from ..models import SHAPES
from .engine import multiply_rate, read_block
from .kernel_inputs import mixture_weights

ROWS = (1, 4, 8, 16, 32, 128, 512)
ROUNDS = 4
DECODED = ((batch, context, 1) for batch in (1, 8, 32) for context in (128, 1024, 4096))
ATTENTION = (*DECODED, (1, 512, 512), (1, 2048, 2048))  # sequences, context, queries of each
BLOCK_SIZE = 16
ONEDNN, READ = "onednn", "read"
MIXTURE = MixtureShape(16, 4, 2048, 1536, normalized=True, activation="silu")
MIXTURE_STEPS, MIXTURE_BYTES = 6, 1 << 30  # of all layers, in each form
LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}


@dataclass(frozen=True)
class Case:
    what: str
    num_bytes: int
    flops: float
    runs: Mapping[str, Callable[[], object]]  # by kernel


def products(model: str, c: ModelConfig, names: list[str]) -> Iterator[Case]:
    qkv, mlp = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.intermediate_size
    layer = [(qkv, c.hidden_size), (c.hidden_size, c.num_heads * c.head_dim)]
    shapes = [*layer, (2 * mlp, c.hidden_size), (c.hidden_size, mlp)] * c.num_layers
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    packed = NativeCpuKernels(1, _cpu.instruction_sets()[0])
    panels = {name: _cpu.use_instruction_set(name) for name in names if name != ONEDNN}
    linears: dict[str, list[Linear]] = {}
    for name in names:
        same = next((other for other in linears if panels.get(other) == panels.get(name)), None)
        if name != ONEDNN and same is None:
            packed = NativeCpuKernels(1, name)
        ours = [packed.linear(weight, None) for weight in weights] if same is None else linears[same]
        linears[name] = [OneDnnLinear(weight, None) for weight in weights] if name == ONEDNN else ours
    size = sum(weight.numel() for weight in weights)
    for rows in ROWS:
        inputs = [torch.randn(rows, k).bfloat16() for _, k in shapes]

        def run(name: str, inputs: list[torch.Tensor] = inputs) -> None:
            for linear, x in zip(linears[name], inputs, strict=True):
                linear(x)

        runs = {name: partial(run, name) for name in names}
        yield Case(f"{model}: all linears, {rows} rows", 2 * size, 2.0 * rows * size, runs)


def attention(model: str, c: ModelConfig, names: list[str]) -> Iterator[Case]:
    kernels = NativeCpuKernels(1, names[0])
    shape = torch.Size((2048, c.num_layers, 2, c.num_kv_heads, BLOCK_SIZE, c.head_dim))
    pool = huge_page_bytes(2 * shape.numel()).view(torch.bfloat16).view(shape).normal_()
    for batch, length, queries in ATTENTION:
        inputs = AttentionInputs(
            torch.arange(0, batch * queries + 1, queries, dtype=torch.int32),
            torch.full((batch,), length, dtype=torch.int32),
            (torch.randperm(batch * length // BLOCK_SIZE) % len(pool)).view(batch, -1).int(),
            c.head_dim**-0.5,
        )
        q = torch.randn(batch * queries, c.num_heads, c.head_dim).bfloat16()

        def run(q: torch.Tensor = q, inputs: AttentionInputs = inputs) -> None:
            for layer in range(c.num_layers):
                kernels.paged_attention(q, pool, layer, inputs)

        num_bytes = batch * length * c.num_layers * 2 * c.num_kv_heads * c.head_dim * 2
        pairs = batch * queries * (length - (queries - 1) / 2)
        flops = 4 * c.num_layers * c.num_heads * c.head_dim * pairs
        what = f"{model}: attention, {batch} x {queries} queries, context {length}"
        yield Case(what, num_bytes, flops, {name: run for name in names if name != ONEDNN})


def config_of(model: str) -> ModelConfig:
    return parse_config({**LLAMA, **SHAPES[model]}, {})


def int4(n: int, k: int) -> QuantisedWeight:
    scales = torch.rand(n, k // 32).add_(0.5).mul_(k**-0.5 / 4).half().float()
    return QuantisedWeight(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), scales, k, 32, 4)


def mxfp4(n: int, k: int) -> QuantisedWeight:
    return replace(int4(n, k), scales=torch.full((n, k // 32), 2.0**-7), float4=True)


def int8(n: int, k: int) -> QuantisedWeight:
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    return QuantisedWeight(codes, torch.full((n, 1), k**-0.5 / 64), k, k, 8)


def float8(n: int, k: int) -> QuantisedWeight:
    """In blocks of 128 x 128."""
    codes = torch.randn(n, k).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return QuantisedWeight(codes, torch.full((n, k // 128), k**-0.5 * 1.001), k, 128, 8)


FORMS: dict[str, tuple[float, Callable[[int, int], QuantisedWeight] | None]] = {
    "bfloat16": (2.0, None),
    "int8": (1.0, int8),
    "float8": (1 + 4 / 128, float8),
    "int4": (0.5 + 2 / 32, int4),
    "mxfp4": (0.5 + 1 / 32, mxfp4),
}
"""Bytes of a weight, and its maker."""


def mixtures(names: list[str]) -> Iterator[Case]:
    """Each run takes other rows, which choose other experts: no weights stay in the caches."""
    panel = _cpu.use_instruction_set(names[0])
    alike = [name for name in names if name != ONEDNN and _cpu.use_instruction_set(name) == panel]
    for form in FORMS:
        yield from experts_in(form, alike if form == "bfloat16" else alike[:1])


def experts_in(form: str, names: list[str]) -> Iterator[Case]:
    kernels, s = NativeCpuKernels(1, names[0]), MIXTURE
    (item, write), expert = FORMS[form], 3 * s.hidden_size * s.intermediate_size
    count = math.ceil(MIXTURE_BYTES / (s.num_experts * expert * item))
    whole = mixture_weights(s, torch.bfloat16)
    if write is not None:
        one = ExpertWeights(
            write(2 * s.intermediate_size, s.hidden_size), write(s.hidden_size, s.intermediate_size)
        )
        whole = replace(whole, expert=lambda i: one)
    routers = [torch.randn_like(whole.router) for _ in range(count)]
    layers = [kernels.mixture(replace(whole, router=router)) for router in routers]
    for rows in (1, 4, 32):
        x = torch.randn(MIXTURE_STEPS, rows, s.hidden_size).bfloat16()
        hit = sum(
            len(set(routes(step @ router.T, s)[0].flatten().tolist())) for step in x for router in routers
        )

        def run(x: torch.Tensor = x) -> None:
            for step in x:
                for layer in layers:
                    layer(step)

        what = (
            f"{form}: {s.num_chosen} of {s.num_experts} experts of {item * expert / 1e6:.0f} MB, {rows} rows"
        )
        flops = 2.0 * MIXTURE_STEPS * rows * count * s.num_chosen * expert
        yield Case(what, int(item * hit * expert), flops, dict.fromkeys(names, run))


def measure(case: Case, block: torch.Tensor, peak: float) -> Iterator[dict[str, str | float]]:
    """``block``: read between two runs of kernels."""
    best = dict.fromkeys([*case.runs, READ], float("inf"))
    turns: list[tuple[str, Callable[[], object]]] = [*case.runs.items(), (READ, block.sum)]
    for name, run in turns * ROUNDS:
        if name not in (ONEDNN, READ):
            _cpu.use_instruction_set(name)
        start = time.thread_time()
        run()
        best[name] = min(best[name], time.thread_time() - start)
    rate = block.nbytes / best.pop(READ)
    for name, seconds in best.items():
        share = max(case.num_bytes / rate, case.flops / peak) / seconds
        gflops, gbytes = case.flops / seconds / 1e9, case.num_bytes / seconds / 1e9
        print(
            f"{case.what:50} {name:12} {seconds * 1e3:8.1f} ms {gflops:6.1f} GFLOP/s {gbytes:5.1f} GB/s "
            f"{share:5.0%} of the floor",
            flush=True,
        )
        yield {
            "what": case.what, "kernel": name, "ms": seconds * 1e3, "share_of_floor": share,
            "read_bytes_per_s": rate,
        }  # fmt: skip


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--models", default="125m,500m", help="of bench/models.py, separated by commas")
    parser.add_argument("--attention", action="store_true", help="without the linear layers")
    parser.add_argument("--mixtures", action="store_true", help="mixtures of experts, instead of models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in _cpu.instruction_sets() if name != "generic"]
    names += [ONEDNN] * cpu_multiplies_bfloat16()
    with torch.inference_mode():
        block, peak = read_block(), multiply_rate(torch.bfloat16)
        print(f"multiplies {peak / 1e9:.0f} GFLOP/s, one thread")
        rows = []
        if options.mixtures:
            rows += [row for case in mixtures(names) for row in measure(case, block, peak)]
        for model in () if options.mixtures else options.models.split(","):
            c = config_of(model)
            for cases in (attention,) if options.attention else (products, attention):
                rows += [row for case in cases(model, c, names) for row in measure(case, block, peak)]
    write_record(options.json, {"environment": environment(), "flops_per_s": peak, "rows": rows})


if __name__ == "__main__":
    main()
