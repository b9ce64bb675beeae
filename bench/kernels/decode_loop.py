"""A decode worker's scheduler and step thread around a runner, without the worker: for what is measured of
steps one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...decode.rows import DecodeStep
from ...decode.scheduler import DecodeScheduler
from ...engine.cache.block_manager import BlockManager
from ...engine.step.batch import SamplingState
from ...engine.step.step_thread import StepThread
from ...transport.messages.messages import SamplingParams
from .engine import BLOCK_SIZE, CONTEXT

MAX_LEN = 4096


def decode_scheduler(batch: int) -> DecodeScheduler:
    """A scheduler with ``batch`` sequences of ``CONTEXT`` tokens each, far from their end."""
    blocks = BlockManager(batch * MAX_LEN // BLOCK_SIZE)
    scheduler = DecodeScheduler(blocks, BLOCK_SIZE, batch, MAX_LEN, frozenset())
    params = SamplingParams(max_tokens=MAX_LEN, temperature=0.0, ignore_eos=True)
    for dispatch in range(batch):
        own = blocks.allocate(CONTEXT // BLOCK_SIZE)
        assert own is not None
        scheduler.join(
            (1, dispatch), f"r{dispatch}", SamplingState(params, [5] * CONTEXT, [7]), own, b"root", 1e9
        )
    return scheduler


def run_steps(
    steps: StepThread[DecodeStep],
    woken: threading.Event,
    scheduler: DecodeScheduler,
    enough: Callable[[int], bool],
    ahead: bool = True,
) -> int:
    """Until ``enough`` of the number of steps that are over, which is returned, or until all sequences have
    ended; the thread is stopped. ``woken`` is set by the thread. ``ahead``: each step is made while the one
    before runs. Raises RuntimeError where a step fails."""
    num_steps = 0
    while not enough(num_steps):
        while (steps.wants_next if ahead else not steps.busy) and (step := scheduler.schedule()) is not None:
            steps.submit(step)
        if not steps.busy:
            break
        woken.wait(1.0)
        woken.clear()
        while (finished := steps.collect()) is not None:
            if finished.output is None:
                raise RuntimeError("a step failed") from finished.error
            scheduler.complete(finished.step, finished.output)
            num_steps += 1
    steps.stop()
    return num_steps
