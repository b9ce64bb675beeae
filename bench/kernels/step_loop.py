"""Steps made ahead beside steps made in turn: decode steps a second, and how long the thread that computes
waits between two.

    python -m splitserve.bench.kernels.step_loop [--model 125m] [--batch 8] [--seconds 4] [--rounds 5] \\
        [--json FILE]

The scheduler and the step thread of a decode worker around a random model, and around a runner that takes no
time. Both ways by turns, so that what else the machine does hits both; the ratio is that of the medians. The
processor time of a step that takes no time, all threads together, is what Python spends on one beside the
model.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...decode.rows import DecodeStep
from ...engine.step.batch import Batch, StepOutput
from ...engine.step.step_thread import Runner, StepThread
from ...worker.main import SWITCH_S
from ..environment import environment, option_parser, write_record
from ..null_workers import NullRunner
from .decode_loop import MAX_LEN, decode_scheduler, run_steps
from .engine import BLOCK_SIZE, make_runner


class Watched:
    """A runner that notes when its steps begin and end."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.gaps: list[float] = []  # seconds
        self._ended = 0.0

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        if self._ended:
            self.gaps.append(time.perf_counter() - self._ended)
        output = self._runner.execute(batch, on_layer)
        self._ended = time.perf_counter()
        return output


def run(
    runner: Runner, batch: int, ahead_at_layer: int, ahead: bool, seconds: float
) -> tuple[float, float, float]:
    """(steps a second, median microseconds between two steps, microseconds of processor time a step)."""
    scheduler = decode_scheduler(batch)
    watched, woken = Watched(runner), threading.Event()
    steps: StepThread[DecodeStep] = StepThread(
        watched, woken.set, ahead_at_layer=ahead_at_layer if ahead else 0
    )
    started, cpu_started = time.perf_counter(), time.process_time()
    num_steps = run_steps(steps, woken, scheduler, lambda _: time.perf_counter() - started >= seconds, ahead)
    cpu_us = (time.process_time() - cpu_started) * 1e6 / num_steps
    return num_steps / (time.perf_counter() - started), statistics.median(watched.gaps) * 1e6, cpu_us


def compare(
    name: str, runner: Runner, batch: int, ahead_at_layer: int, seconds: float, rounds: int
) -> dict[str, object]:
    taken: dict[str, list[tuple[float, float, float]]] = {"in_turn": [], "ahead": []}
    for _ in range(rounds):
        for way, found in taken.items():
            found.append(run(runner, batch, ahead_at_layer, way == "ahead", seconds))
    medians = {way: map(statistics.median, zip(*found, strict=True)) for way, found in taken.items()}
    rate, gap, cost = (dict(zip(medians, pair, strict=True)) for pair in zip(*medians.values(), strict=True))
    rate["ratio"] = rate["ahead"] / rate["in_turn"]
    row = {"model": name, "batch": batch, "steps_per_s": rate, "gap_us": gap, "cpu_us": cost}
    print(row, flush=True)
    return row


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--model", default="125m", help="of bench/models.py (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=4, help="of each way in each round (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    with tempfile.TemporaryDirectory() as folder:
        model = make_runner(
            Path(folder),
            options.model,
            "bfloat16",
            exact=False,
            num_blocks=options.batch * MAX_LEN // BLOCK_SIZE,
        )
        layers = max(1, model.config.num_layers - 1)
        rows = [
            compare("null", NullRunner(), options.batch, 0, options.seconds, options.rounds),
            compare(options.model, model, options.batch, layers, options.seconds, options.rounds),
        ]
    write_record(options.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
