"""What a worker's own parts add on a GPU: time to ready, the first request beside later ones, idle time between steps; and a peer.

A random model of half a billion weights, from files as a worker loads it. ``big``: for a GPU; else a tiny one that only shows that all of
it runs. The peer, transformers' continuous batching, needs a GPU.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..decode.rows import DecodeStep
from ..engine.model_runner import EngineConfig, ModelRunner
from ..engine.step_thread import StepThread
from .engine import CONTEXT, make_batch
from .engine_figures import device_us
from .gpu_timing import Ceilings, Figure
from .models import LLAMA_500M, LLAMA_TINY, make_random_llama
from .step_loop import MAX_LEN, decode_scheduler

PROMPT, OUTPUT = 256, 64
REQUESTS, BATCH = 10, 32
STEPS = 200


def worker_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    batch, steps = (BATCH, STEPS) if big else (2, 5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_random_llama(path, **(LLAMA_500M if big else LLAMA_TINY))
        started = time.perf_counter()
        config = EngineConfig(path, device, "bfloat16", 16, batch * MAX_LEN // 16, max_model_len=MAX_LEN, max_decode_seqs=batch)
        runner = ModelRunner(config)
        runner.warm_up()
        yield _figure(f"0.5B: from files to ready ({runner.phases})", started, None, 1)
        yield first_requests(runner)
        yield idle_between_steps(runner, batch, steps)
        if big:
            yield against_transformers(runner, path, device)
        del runner
    gc.collect()


def first_requests(runner: ModelRunner) -> Figure:
    """The first request's time; its floor is that of the tenth and those before it."""
    times = []
    for _ in range(REQUESTS):
        started = time.perf_counter()
        for start, count in ((0, PROMPT), (PROMPT, 1), (PROMPT + 1, 1)):
            batch = make_batch(1, start, count)
            batch.token_ids[:] %= runner.config.vocab_size
            runner.execute(batch)
        times.append((time.perf_counter() - started) * 1e6)
    later = statistics.median(times[REQUESTS // 2 :])
    return Figure(f"0.5B: first request after the start, {PROMPT} tokens and 2 steps, beside the tenth", times[0], later, 1e6 / later, "")


def idle_between_steps(runner: ModelRunner, batch: int, steps: int) -> Figure:
    """A step's time by the worker's own loop; its floor is the device's part of it. 1 - the ratio is idle."""
    made = make_batch(batch, CONTEXT - 1, 1)
    made.token_ids[:] %= runner.config.vocab_size
    device = device_us(lambda: runner.launch(made), 20)
    started = time.perf_counter()
    loop(runner, batch, steps)
    return _figure(f"0.5B: decode step by the worker's loop, batch {batch}, context {CONTEXT}: the device's part", started, device, steps)


def loop(runner: ModelRunner, batch: int, steps: int) -> None:
    """So many decode steps, each made while the one before runs."""
    scheduler, woken = decode_scheduler(batch), threading.Event()
    thread: StepThread[DecodeStep] = StepThread(runner, woken.set, launch=runner.launch)
    done = 0
    while done < steps:
        while thread.wants_next and (step := scheduler.schedule()) is not None:
            step.batch.token_ids[:] %= runner.config.vocab_size
            thread.submit(step)
        woken.wait(1.0)
        woken.clear()
        while (finished := thread.collect()) is not None:
            if finished.output is None:
                raise RuntimeError("a step failed") from finished.error
            scheduler.complete(finished.step, finished.output)
            done += 1
    thread.stop()


def against_transformers(runner: ModelRunner, path: Path, device: str) -> Figure:
    """32 prompts of 256 tokens, 64 tokens each: our time, and as its floor the peer's. A ratio above 1: we are quicker."""
    started = time.perf_counter()
    for _ in range(BATCH // 8):
        runner.execute(make_batch(8, 0, PROMPT))
    loop(runner, BATCH, OUTPUT - 1)
    ours = (time.perf_counter() - started) * 1e6
    theirs = transformers_us(path, device)
    return Figure(
        f"0.5B: {BATCH} prompts of {PROMPT}, {OUTPUT} tokens each, beside transformers", ours, theirs, BATCH * OUTPUT / ours * 1e6, "tok"
    )


def transformers_us(path: Path, device: str) -> float:
    """Of its second run: the first compiles and warms up."""
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
    wanted = library.GenerationConfig(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[5 + i] * PROMPT for i in range(BATCH)]
    took = 0.0
    for _ in range(2):
        started = time.perf_counter()
        answers = model.generate_batch(prompts, generation_config=wanted)
        took = (time.perf_counter() - started) * 1e6
        assert sum(len(answer.generated_tokens) for answer in answers.values()) == BATCH * OUTPUT
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return took


def _figure(what: str, started: float, floor_us: float | None, count: int) -> Figure:
    us = (time.perf_counter() - started) * 1e6 / count
    return Figure(what, us, us if floor_us is None else floor_us, 1e6 / us, "")
