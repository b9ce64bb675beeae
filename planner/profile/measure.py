"""Runs the designed steps on a real model runner until their times are known well enough, and fits the
profile."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...decode.rows import DecodeStep
from ...decode.scheduler import DecodeScheduler
from ...engine.cache.block_manager import BlockManager
from ...engine.latency_profile import StepModel, StepRole
from ...engine.step.batch import Batch, SamplingState, StepOutput
from ...engine.step.step_thread import Runner, StepThread
from ...transport.messages.messages import SamplingParams
from .design import Bounds, Experiment, decode_knots, prefill_knots
from .fit import StepPoint, fit_steps, residuals

MIN_REPEATS, MAX_REPEATS = 5, 60
TRIMMED = 0.1
"""This share of the repeats at either end is left out: the machine had something else to do."""


def middle_of(times: Sequence[float]) -> list[float]:
    """Without the slowest and the quickest."""
    cut = int(len(times) * TRIMMED)
    return sorted(times)[cut : len(times) - cut]


def uncertainty_of(times: Sequence[float]) -> float:
    """Half of the 95% confidence interval of their mean, relative; needs two times."""
    middle = middle_of(times)
    return float(1.96 * statistics.stdev(middle) / len(middle) ** 0.5 / statistics.fmean(middle))


@dataclass(slots=True)
class Repeats:
    """One experiment's times, in seconds."""

    experiment: Experiment
    times: list[float] = field(default_factory=list)

    @property
    def middle(self) -> list[float]:
        return middle_of(self.times)

    @property
    def seconds(self) -> float:
        return statistics.fmean(self.middle)

    @property
    def uncertainty(self) -> float:
        """Half of the 95% confidence interval, relative."""
        return float("inf") if len(self.times) < MIN_REPEATS else uncertainty_of(self.times)

    def point(self) -> StepPoint:
        e = self.experiment
        return StepPoint(e.units, e.reads, len(e.sequences), self.seconds, e.cached)


def batch_of(experiment: Experiment, block_size: int) -> Batch:
    """The step's input: its sequences lie side by side in the first blocks of the pool."""
    sequences = experiment.sequences
    lens = [cached + new for cached, new in sequences]
    counts = [-(-n // block_size) for n in lens]
    tables = np.zeros((len(sequences), max(counts)), np.int32)
    positions, slots, first = [], [], 0
    for row, ((cached, new), count) in enumerate(zip(sequences, counts, strict=True)):
        tables[row, :count] = np.arange(first, first + count)
        at = np.arange(cached, cached + new)
        positions.append(at.astype(np.int32))
        slots.append(tables[row, at // block_size].astype(np.int64) * block_size + at % block_size)
        first += count
    params = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
    num_tokens = sum(new for _, new in sequences)
    return Batch(
        token_ids=(np.arange(num_tokens) % 97 + 3).astype(np.int32),
        positions=np.concatenate(positions),
        query_start_loc=np.cumsum([0, *(new for _, new in sequences)], dtype=np.int32),
        seq_lens=np.array(lens, np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate(slots),
        sampling=[SamplingState(params, [0] * n, []) for n in lens],
    )


def measure(
    runner: Runner,
    block_size: int,
    experiments: Sequence[Experiment],
    precision: float,
    budget_s: float,
    progress: Callable[[int], None],
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Repeats]:
    """Run rounds over all experiments in random order, so that changes of the machine affect all alike.

    An experiment that is known to ``precision`` (relative, 95%) drops out. ``progress`` gets the number of
    known ones. Ends after ``budget_s`` seconds, but not before each has run ``MIN_REPEATS`` times."""
    draw, end = random.Random(seed), clock() + budget_s
    found = [Repeats(experiment) for experiment in experiments]
    batches = [batch_of(experiment, block_size) for experiment in experiments]
    for batch in batches:
        runner.execute(batch)  # what is slow only once
    open_ones = list(range(len(found)))
    while open_ones:
        draw.shuffle(open_ones)
        for i in open_ones:
            if clock() < end or len(found[i].times) < MIN_REPEATS:
                began = clock()
                runner.execute(batches[i])
                found[i].times.append(clock() - began)
        over = clock() >= end
        open_ones = [i for i in open_ones if _wants_more(found[i], precision, over)]
        progress(len(found) - len(open_ones))
    return found


def _wants_more(repeats: Repeats, precision: float, over: bool) -> bool:
    if len(repeats.times) < MIN_REPEATS:
        return True
    return not over and repeats.uncertainty > precision and len(repeats.times) < MAX_REPEATS


def fitted(found: Sequence[Repeats], role: StepRole, bounds: Bounds) -> StepModel:
    """The role's step model, with how well it meets the steps that it was not fitted to."""
    of_role = [repeats for repeats in found if repeats.experiment.role == role]
    seen = [r.point() for r in of_role if not r.experiment.held_out]
    held_out = [r.point() for r in of_role if r.experiment.held_out]
    knots = prefill_knots(bounds) if role == "prefill" else decode_knots(bounds)
    model = fit_steps(seen, knots, ("read_s", "seq_s", "cached_s") if role == "prefill" else ("read_s",))
    return model.model_copy(update={"held_out": residuals(model, held_out)}) if held_out else model


def noise_cv(found: Sequence[Repeats]) -> float:
    """How much a step's time varies about its mean, typically."""
    return statistics.median(statistics.stdev(r.middle) / r.seconds for r in found)


class _NullRunner:
    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        return StepOutput(np.full(batch.num_seqs, 7, np.int32))


def decode_loop_s(num_seqs: int, num_steps: int = 200) -> float:
    """Seconds between two decode steps: the real scheduler and the step's thread around a runner that takes
    no time."""
    scheduler = DecodeScheduler(BlockManager(num_seqs * 40), 16, num_seqs, 1 << 16, frozenset())
    for i in range(num_seqs):
        blocks = scheduler.blocks.allocate(4)
        assert blocks is not None
        state = SamplingState(SamplingParams(max_tokens=1 << 15, temperature=0.0), [3] * 60, [3])
        scheduler.join((1, i), f"r{i}", state, blocks, b"", 1e18)
    woken = threading.Event()
    steps: StepThread[DecodeStep] = StepThread(_NullRunner(), woken.set)
    times = []
    for _ in range(num_steps):
        began = time.perf_counter()
        step = scheduler.schedule()
        assert step is not None
        steps.submit(step)
        woken.wait()
        woken.clear()
        finished = steps.collect()
        assert finished is not None
        assert finished.output is not None
        scheduler.complete(finished.step, finished.output)
        times.append(time.perf_counter() - began)
    steps.stop()
    return statistics.median(times)
