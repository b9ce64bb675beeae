"""A model split between two ranks of one thread, beside the whole one on two threads and on one: by turns.

    python -m splitserve.bench.kernels.ranks [--models 125m,500m] [--rounds 5] [--json FILE]

Each figure is the median of the rounds; ``ratio``: two ranks over two threads, the median of the rounds'
ratios. On CPUs ranks are for rehearsals and for hosts with several sockets: threads share what ranks sum.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from ...engine.engine_config import EngineConfig
from ...engine.settings import WorkerSettings
from ...engine.step.batch import Batch
from ...engine.step.model_runner import ModelRunner
from ..environment import environment, option_parser, write_record
from ..models import SHAPES, make_random_llama
from .engine import make_batch

LENGTH, STEPS = 512, 8
ARMS = {"one thread": (1, 1), "two threads": (1, 2), "two ranks": (2, 1)}  # ranks, threads of each


@dataclass(frozen=True)
class Row:
    model: str
    step: str
    ms: dict[str, float]
    ratio: float


def milliseconds(runner: ModelRunner, batch: Batch) -> float:
    start = time.perf_counter()
    runner.execute(batch)
    return 1e3 * (time.perf_counter() - start)


def measured(model: str, folder: Path, rounds: int) -> list[Row]:
    make_random_llama(folder, torch.bfloat16, **SHAPES[model])
    runners = {name: runner_of(folder, *arm) for name, arm in ARMS.items()}
    steps = {f"prefill of {LENGTH}": (make_batch(1, 0, LENGTH), 1)}
    steps |= {f"decode of {n} at {LENGTH}": (make_batch(n, LENGTH, 1), STEPS) for n in (1, 8, 32)}
    rows = []
    for step, (batch, times) in steps.items():
        taken: dict[str, list[float]] = {name: [] for name in ARMS}
        for _ in range(rounds + 1):  # the first is not counted
            for name, runner in runners.items():
                run = partial(milliseconds, runner, batch)
                taken[name].append(statistics.median(run() for _ in range(times)))
        ratios = [a / b for a, b in zip(taken["two ranks"][1:], taken["two threads"][1:], strict=True)]
        medians = {name: round(statistics.median(found[1:]), 2) for name, found in taken.items()}
        rows.append(Row(model, step, medians, round(statistics.median(ratios), 3)))
        print(rows[-1], flush=True)
    return rows


def runner_of(folder: Path, num_ranks: int, threads: int) -> ModelRunner:
    settings = WorkerSettings(
        model=folder, insecure=True, device="cpu", num_blocks=1100, max_model_len=1024,
        tensor_parallel_size=num_ranks, threads=threads,
    )  # fmt: skip
    runner = ModelRunner(EngineConfig(settings))
    runner.warm_up()
    return runner


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--models", default="125m,500m")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows: list[Row] = []
    for model in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows += measured(model, Path(folder), options.rounds)
    write_record(options.json, {"environment": environment(), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
