"""Measures how much slower a step gets while another worker of the same host computes.

In each round every shape of step runs beside a neighbour that rests, computes prompts, or generates, in
random order. A shape's slowdown is the median over rounds of (time beside) / (time alone), with the 95%
interval of a median by McGill, Tukey and Larsen (1978), 1.57 * interquartile range / sqrt(rounds). The result
is the mean over shapes. Times are this process's processor time, so waiting for a processor does not count.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...engine.latency_profile import Contention, StepRole
from ...engine.step.batch import Batch
from ...engine.step.step_thread import Runner
from .design import Bounds, Experiment
from .measure import batch_of

MIN_ROUNDS, MAX_ROUNDS = 6, 40
ROLES: tuple[StepRole, ...] = ("prefill", "decode")
STATES: tuple[StepRole | None, ...] = (None, *ROLES)
PREFILL_TOKENS = 256
"""Most tokens of a prefill step here: a whole step takes seconds on a CPU."""
LEAST_S = 0.05
"""Seconds for which a short step is repeated in each round."""


class Neighbour(Protocol):
    """Another worker of this host."""

    def compute(self, role: StepRole | None) -> None:
        """From the return of this on it computes steps of this role, one after the other; None: it rests."""


@dataclass(slots=True)
class Beside:
    """Steps of one shape beside a neighbour of one role: in each round, how many times as long as alone."""

    experiment: Experiment
    neighbour: StepRole
    ratios: list[float] = field(default_factory=list)

    @property
    def slowdown(self) -> float:
        return statistics.median(self.ratios)

    @property
    def uncertainty(self) -> float:
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return 1.57 * (high - low) / math.sqrt(len(self.ratios))


def shapes(bounds: Bounds) -> list[Experiment]:
    """Steps of both roles as they occur: prompts short, long and with much before them; batches small and
    large, with short and long contexts."""
    tokens, longest = min(PREFILL_TOKENS, bounds.max_batch_tokens), bounds.max_model_len - 1
    prompts = [
        ((0, max(1, tokens // 8)),),
        ((0, tokens),),
        ((max(0, min(longest, 4 * tokens) - tokens), tokens),),
    ]
    batches = []
    for seqs in (1, max(1, bounds.max_num_seqs // 8), bounds.max_num_seqs):
        longest_here = min(longest, bounds.num_blocks // seqs * bounds.block_size - 1)
        batches += [((context, 1),) * seqs for context in (min(64, longest_here), longest_here // 2)]
    found: dict[Experiment, None] = {}
    found |= {Experiment("prefill", sequences): None for sequences in prompts if bounds.fits(sequences)}
    found |= {Experiment("decode", sequences): None for sequences in batches if bounds.fits(sequences)}
    return list(found)


def measure_contention(
    runner: Runner,
    neighbour: Neighbour,
    block_size: int,
    experiments: Sequence[Experiment],
    precision: float,
    budget_s: float,
    progress: Callable[[int], None],
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    processor_clock: Callable[[], float] = time.process_time,
) -> list[Beside]:
    """Measure until all slowdowns are known to ``precision`` (of the time alone, 95%), or for ``budget_s``
    seconds.

    It runs ``MIN_ROUNDS`` rounds at least. ``progress`` is called after each round."""
    draw, end = random.Random(seed), clock() + budget_s
    batches = {experiment: batch_of(experiment, block_size) for experiment in experiments}
    found = [Beside(experiment, role) for role in ROLES for experiment in experiments]
    for number in range(1, MAX_ROUNDS + 1):
        times = {}
        for state in draw.sample(STATES, len(STATES)):
            neighbour.compute(state)
            times[state] = {e: _seconds(runner, batch, processor_clock) for e, batch in batches.items()}
        for beside in found:
            beside.ratios.append(times[beside.neighbour][beside.experiment] / times[None][beside.experiment])
        progress(number)
        if number >= MIN_ROUNDS and (clock() >= end or all(u <= precision for _, _, u, _ in by_roles(found))):
            break
    neighbour.compute(None)
    return found


def _seconds(runner: Runner, batch: Batch, processor_clock: Callable[[], float]) -> float:
    """Mean seconds of a step, over as many as fit into ``LEAST_S``."""
    began, count = processor_clock(), 0
    while True:
        runner.execute(batch)
        count += 1
        if (took := processor_clock() - began) >= LEAST_S:
            return took / count


def by_roles(found: Sequence[Beside]) -> Iterator[tuple[str, float, float, tuple[float, float]]]:
    """For each pair of roles: its name in ``Contention``, the slowdown, its uncertainty, and the least and
    most of a shape."""
    for role in ROLES:
        for neighbour in ROLES:
            of_pair = [b for b in found if b.experiment.role == role and b.neighbour == neighbour]
            each = [b.slowdown for b in of_pair]
            uncertainty = math.hypot(*(b.uncertainty for b in of_pair)) / len(of_pair)
            yield f"{role}_beside_{neighbour}", statistics.fmean(each), uncertainty, (min(each), max(each))


def contention_of(found: Sequence[Beside]) -> Contention:
    """Nothing gets quicker by a neighbour: what is measured below 1 is chance."""
    pairs = list(by_roles(found))
    slowdowns = {name: max(1.0, mean) for name, mean, _, _ in pairs}
    return Contention.model_validate(
        {**slowdowns, "ranges": {name: least_most for name, _, _, least_most in pairs}}
    )
