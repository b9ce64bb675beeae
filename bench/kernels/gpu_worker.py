"""What a worker's own parts add on a GPU: time to ready, the first request beside later ones, idle time
between steps; and a peer.

A random model of half a billion weights, from files as a worker loads it. ``big``: for a GPU; else a tiny one
that only shows that all of it runs.

    # loads it as a decode worker does, and prints the time of each phase
    python -m splitserve.bench.kernels.gpu_worker FOLDER DEVICE BATCH
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ...decode.rows import DecodeStep
from ...engine.engine_config import EngineConfig
from ...engine.load_model import load_model
from ...engine.settings import WorkerSettings
from ...engine.step.model_runner import ModelRunner
from ...engine.step.step_progress import StepForecast
from ...engine.step.step_thread import StepThread
from ..models import LLAMA_500M, LLAMA_TINY, make_random_llama
from .decode_loop import MAX_LEN, decode_scheduler, run_steps
from .engine import CONTEXT, make_batch
from .engine_figures import device_us
from .gpu_timing import Ceilings, Figure
from .transformers_peer import peer_us

PROMPT, OUTPUT = 256, 64
REQUESTS, BATCH = 10, 32
STEPS = 200


def worker_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    batch, steps = (BATCH, STEPS) if big else (2, 5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_random_llama(path, **(LLAMA_500M if big else LLAMA_TINY))
        yield from_start_to_ready(path, device, batch)
        runner = ModelRunner(EngineConfig(_settings(path, device, batch, MAX_LEN), max_decode_seqs=batch))
        runner.warm_up()
        yield first_requests(runner, PROMPT if big else 20)
        yield from (idle_between_steps(runner, batch, steps, late) for late in (True, False))
        yield against_transformers(runner, path, device, batch, (PROMPT, OUTPUT) if big else (20, 4))
        del runner
    gc.collect()


def from_start_to_ready(path: Path, device: str, batch: int) -> Figure:
    """Seconds from the start of a process to ready; its floor is the time after Python and torch are
    loaded."""
    started = time.perf_counter()
    command = [sys.executable, "-m", f"{__package__}.gpu_worker", str(path), device, str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    us = (time.perf_counter() - started) * 1e6
    if done.returncode != 0:
        raise RuntimeError(f"a worker's model did not load: {done.stderr[-300:]}")
    seconds, _, phases = done.stdout.strip().splitlines()[-1].partition(" ")
    return Figure(
        f"0.5B: from process start to ready ({phases}): the model's part",
        us,
        float(seconds) * 1e6,
        1e6 / us,
        "",
    )


def _settings(path: Path, device: str, batch: int, max_model_len: int | None = None) -> WorkerSettings:
    return WorkerSettings(
        model=path,
        insecure=True,
        device=device,
        dtype="bfloat16",
        block_size=16,
        num_blocks=batch * MAX_LEN // 16,
        max_model_len=max_model_len,
    )


def load(path: Path, device: str, batch: int) -> str:
    """Seconds, then those of each phase."""
    started = time.perf_counter()
    model = load_model(_settings(path, device, batch), max_decode_seqs=batch)
    assert isinstance(model.runner, ModelRunner)
    return f"{time.perf_counter() - started:.3f} {model.runner.phases}"


def first_requests(runner: ModelRunner, prompt: int) -> Figure:
    """The first request's time; its floor is that of the tenth and those before it."""
    times = []
    for _ in range(REQUESTS):
        started = time.perf_counter()
        for start, count in ((0, prompt), (prompt, 1), (prompt + 1, 1)):
            batch = make_batch(1, start, count)
            batch.token_ids[:] %= runner.config.vocab_size
            runner.execute(batch)
        times.append((time.perf_counter() - started) * 1e6)
    later = statistics.median(times[REQUESTS // 2 :])
    return Figure(
        f"0.5B: first request after the start, {prompt} tokens and 2 steps, beside the tenth",
        times[0],
        later,
        1e6 / later,
        "",
    )


def idle_between_steps(runner: ModelRunner, batch: int, steps: int, late: bool) -> Figure:
    """A step's time by the worker's own loop; its floor is the device's part of it. 1 - the ratio is idle.
    ``late``: as workers make steps, when the running one is expected to be nearly over; else as soon as that
    one is launched."""
    made = make_batch(batch, CONTEXT - 1, 1)
    made.token_ids[:] %= runner.config.vocab_size
    device = device_us(lambda: runner.launch(made), 20)
    us = loop(runner, batch, steps, late) / steps
    made_when = "late" if late else "at once"
    what = (
        f"0.5B: decode step by the worker's loop, the next made {made_when}, batch {batch}, context "
        f"{CONTEXT}: the device's part"
    )
    return Figure(what, us, device, 1e6 / us, "")


def loop(runner: ModelRunner, batch: int, steps: int, late: bool = True) -> float:
    """Microseconds of ``steps`` decode steps, each made while the last one runs."""
    scheduler, woken = decode_scheduler(batch), threading.Event()
    forecast = StepForecast() if late else None
    thread: StepThread[DecodeStep] = StepThread(runner, woken.set, launch=runner.launch, forecast=forecast)
    started = time.perf_counter()
    run_steps(thread, woken, scheduler, lambda done: done >= steps)
    return (time.perf_counter() - started) * 1e6


def against_transformers(
    runner: ModelRunner, path: Path, device: str, num_prompts: int, lengths: tuple[int, int]
) -> Figure:
    """Prompts and answers of these lengths: our time, and as its floor the peer's. A ratio above 1: we are
    quicker. Raises PeerFailed."""
    prompt, output = lengths
    started = time.perf_counter()
    for first in range(0, num_prompts, 8):
        batch = make_batch(min(8, num_prompts - first), 0, prompt)
        batch.token_ids[:] %= runner.config.vocab_size
        runner.execute(batch)
    loop(runner, num_prompts, output - 1)
    ours = (time.perf_counter() - started) * 1e6
    theirs = peer_us(path, device, num_prompts, prompt, output)
    what = f"0.5B: {num_prompts} prompts of {prompt}, {output} tokens each, beside transformers"
    return Figure(what, ours, theirs, num_prompts * output / ours * 1e6, "tok")


if __name__ == "__main__":
    print(load(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
