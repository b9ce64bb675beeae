"""The same GGUF file in splitserve and in llama.cpp, in turns, one thread each: decode and a prompt.

    python -m splitserve.bench.peers.gguf_peer FILE.gguf... --llama-bench build/bin/llama-bench [--rounds 5]

Each round takes one reading of either, so that both have the same load from other processes; of each test the
best and the median of the rounds' ratios are printed. A batch of 8 is, in llama-bench, a prompt of 8 tokens
after 1,024: it has no test of several sequences.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path

from ...cli.model_source import resolved
from ...engine.engine_config import EngineConfig
from ...engine.settings import WorkerSettings
from ...engine.step.model_runner import ModelRunner
from ..environment import option_parser
from ..kernels.engine import BLOCK_SIZE, CONTEXT, make_batch

TESTS = {"decode, batch 1": (1, CONTEXT, 1), "batch of 8": (8, CONTEXT, 1), "prompt of 128": (1, 0, 128)}
"""Sequences, tokens in the cache, tokens computed."""
SECONDS = 1.0  # of a reading of splitserve


def ours(runner: ModelRunner, num_seqs: int, start: int, count: int) -> float:
    """Tokens/s of steps with this batch, wall time."""
    step = make_batch(num_seqs, start, count)
    runner.execute(step)
    began, steps = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < SECONDS or not steps:
        runner.execute(step)
        steps += 1
    return num_seqs * count * steps / seconds


def theirs(llama_bench: Path, file: Path) -> dict[str, float]:
    """Tokens/s of each test by llama-bench."""
    command = [str(llama_bench), "-m", str(file), "-t", "1", "-r", "1", "-o", "json"]
    runs = (["-p", "8", "-n", "16", "-d", str(CONTEXT)], ["-p", "128", "-n", "0", "-d", "0"])
    found = [
        float(test["avg_ts"])
        for run in runs
        for test in json.loads(subprocess.run([*command, *run], capture_output=True, check=True).stdout)
    ]
    of_eight, decode, prompt = found
    return dict(zip(TESTS, (decode, of_eight, prompt), strict=True))


def compare(file: Path, llama_bench: Path, rounds: int) -> None:
    """Print a line for each test."""
    num_blocks = 8 * (CONTEXT // BLOCK_SIZE + 1)
    model = resolved(str(file))
    settings = WorkerSettings(
        model=model, insecure=True, device="cpu", block_size=BLOCK_SIZE, num_blocks=num_blocks
    )
    runner = ModelRunner(EngineConfig(settings))
    runner.warm_up()
    runner.kv_cache.pool.normal_()
    readings: dict[str, list[tuple[float, float]]] = {name: [] for name in TESTS}
    for _ in range(rounds):
        other = theirs(llama_bench, file)
        for name, test in TESTS.items():
            readings[name].append((ours(runner, *test), other[name]))
    for name, pairs in readings.items():
        mine, other_best = (max(of) for of in zip(*pairs, strict=True))
        ratio = statistics.median(own / other for own, other in pairs)
        print(
            f"{file.name:28} {name:16} splitserve {mine:7.1f}  llama.cpp {other_best:7.1f} tokens/s  "
            f"ratio of the best {mine / other_best:5.2f}, median {ratio:5.2f}",
            flush=True,
        )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for file in arguments.files:
        compare(file, arguments.llama_bench, arguments.rounds)


if __name__ == "__main__":
    main()
