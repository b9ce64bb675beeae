"""One machine as splitwise-sim models it, quirks included: for comparing our simulator's parts with its
published results, and no physics.

A *work* is a request's prompt or all of its other tokens. A machine runs iterations over a batch of works;
iterations without prompts run contiguously until a token work ends or something arrives. What is imitated on
purpose:

- decode time is read from a curve over prompt tokens at the *number of sequences*, so that it hardly depends
  on the batch;
- a batch with prompts and tokens takes 1.1 times the time of as many prompt tokens; prompts are never cut;
- a work that waits counts every iteration that leaves it out as a preemption, and comes first after four of
  them;
- KV bytes take no account of grouped heads; a token work reserves the memory of its whole answer when it
  begins.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ...engine.latency_profile import StepModel
from .splitwise_clock import Clock, Event

MAX_BATCH, MAX_TOKENS, MAX_PREEMPTIONS = 512, 2048, 4
MIXED = 1.1
GIB = 1 << 30
MACHINE_BYTES = 8 * 80 * GIB


@dataclass(frozen=True, slots=True)
class LlmShape:
    """``width``: the hidden size, for its KV bytes."""

    weight_bytes: float
    width: int
    num_layers: int

    def kv_bytes(self, num_tokens: int) -> int:
        return 2 * num_tokens * self.width * self.num_layers * 2


@dataclass(slots=True, eq=False)
class Job:
    """A request. ``memory``: bytes it holds on the machine where it is."""

    number: int
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    memory: int = 0
    ttft: float = 0.0
    e2e: float = 0.0
    prompt_ended: float = 0.0
    decode_began: float = 0.0


@dataclass(slots=True, eq=False)
class Work:
    """``left``: iterations that it still takes part in. ``after``: what happens when it is done."""

    job: Job
    is_prompt: bool
    memory: int
    left: float
    after: Callable[[], None] = lambda: None
    state: Literal["new", "queued", "running", "blocked", "done"] = "new"
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        return self.job.num_prompt_tokens if self.is_prompt else 1


@dataclass(slots=True, eq=False)
class Machine:
    """``promised_*``: what the cluster's scheduler has counted here. ``on_free``: called when nothing is left
    to do."""

    clock: Clock
    shape: LlmShape
    prompt_time: StepModel
    token_time: StepModel
    tag: Literal["prompt", "token", "all"]
    on_free: Callable[[Machine], None]
    memory: float = field(init=False)
    promised_memory: float = field(init=False)
    promised_tokens: int = 0
    pending: list[Work] = field(default_factory=list)
    _jobs: list[Job] = field(default_factory=list)  # by arrival
    _works: dict[Job, list[Work]] = field(default_factory=dict)
    _prompts: list[Work] = field(default_factory=list)
    _blocked: list[Work] = field(default_factory=list)
    _batch: list[Work] = field(default_factory=list)
    _batch_tokens: int = 0
    _seconds: float = 0.0  # of one iteration
    _count: float = 0.0  # contiguous iterations
    _end: Event | None = None
    _paused: bool = False

    def __post_init__(self) -> None:
        self.memory = self.promised_memory = self.shape.weight_bytes

    def fits(self, memory: float) -> bool:
        return self.memory + memory <= MACHINE_BYTES

    def free(self, job: Job) -> None:
        """The job's memory here is given back; what it holds is not changed (it may hold as much
        elsewhere)."""
        self.memory -= job.memory
        self.promised_memory -= job.memory

    def arrive(self, work: Work) -> None:
        """A work is to be done here."""
        work.state = "queued"
        if work.job in self._works:
            self._works[work.job].append(work)
        else:
            bisect.insort(self._jobs, work.job, key=lambda job: job.arrival)
            self._works[work.job] = [work]
        self._queue(work)
        if not self._batch:
            if self.fits(work.memory):
                self._iterate()
        elif len(self._batch) < MAX_BATCH and self._batch_tokens + work.tokens <= MAX_TOKENS:
            self._pause()
        elif work.is_prompt:
            num_prompts = sum(w.is_prompt for w in self._batch)
            prompt_tokens = self._batch_tokens - (len(self._batch) - num_prompts)
            if num_prompts < len(self._batch) and prompt_tokens + work.tokens <= MAX_TOKENS:
                self._pause()

    def blocks_left(self) -> None:
        """A transfer from here has ended: there may be room now."""
        if not self.pending:
            return
        if not self._batch:
            if self.fits(self.pending[0].memory):
                self._iterate()
        elif len(self._batch) < MAX_BATCH and self._batch_tokens < MAX_TOKENS:
            self._pause()

    def _queue(self, work: Work) -> None:
        bisect.insort(self.pending, work, key=lambda w: (w.preemptions, w.job.arrival))
        if work.is_prompt:
            self._prompts.append(work)

    def _unqueue(self, work: Work) -> None:
        for queue in (self.pending, self._blocked, self._prompts):
            if work in queue:
                queue.remove(work)

    def _iterate(self) -> None:
        """Begins the next iteration, or as many as run without a change."""
        chosen = self._select()
        for work in [w for w in self._batch if w not in chosen]:
            work.state = "blocked"
            self._batch.remove(work)
            self._queue(work)
            self._blocked.append(work)
        for work in [w for w in chosen if w not in self._batch]:
            self._unqueue(work)
            self._batch.append(work)
        for job in self._jobs:
            if self._works[job][0] not in self._batch:
                self._works[job][0].preemptions += 1
        if not self._batch:
            if not self._jobs:
                self.on_free(self)
            return
        self._seconds = self._iteration_seconds()
        self._count = 1 if any(w.is_prompt for w in self._batch) else min(w.left for w in self._batch)
        for work in self._batch:
            if work.state == "queued":
                self.memory += work.memory
                work.job.memory += work.memory
                if not work.is_prompt:
                    work.job.decode_began = self.clock.now
            work.state = "running"
        self._end = self.clock.after(self._seconds * self._count, self._iterated)

    def _iteration_seconds(self) -> float:
        tokens = sum(w.tokens for w in self._batch)
        num_prompts = sum(w.is_prompt for w in self._batch)
        if num_prompts == 0:
            return self.token_time.seconds(tokens, 0, 1)
        seconds = self.prompt_time.seconds(tokens, 0, 1)
        return seconds if num_prompts == len(self._batch) else seconds * MIXED

    def _iterated(self) -> None:
        for work in self._batch:
            work.left -= self._count
        for work in [w for w in self._batch if w.left == 0]:
            self._finish(work)
        self._paused = False
        self._iterate()

    def _finish(self, work: Work) -> None:
        job, now = work.job, self.clock.now
        work.state = "done"
        if work.is_prompt:
            self.promised_tokens -= job.num_prompt_tokens
            job.ttft, job.prompt_ended = now - job.arrival, now
        else:
            self.promised_tokens -= 1
            self.free(job)
            job.memory = 0
        self._batch.remove(work)
        self._works[job].remove(work)
        if not self._works[job]:
            self._jobs.remove(job)
            del self._works[job]
        work.after()

    def _pause(self) -> None:
        """The contiguous iterations end with the one that is running."""
        if self._paused or any(w.is_prompt for w in self._batch):
            return
        assert self._end is not None
        self._paused = True
        began = self._end.time - self._seconds * self._count
        elapsed = self.clock.now - began
        self._count = elapsed // self._seconds + 1
        self._end.cancelled = True
        self._end = self.clock.after(self._seconds * self._count - elapsed, self._iterated)

    def _select(self) -> list[Work]:
        """The next batch: requests that have waited for four iterations, prompts, those put aside, those
        running, then the rest."""
        choice = _Choice(self.memory)
        for work in self.pending:
            if work.preemptions < MAX_PREEMPTIONS or not choice.has_room(work):
                break
            choice.add_if_it_fits(work)
        for work in self._prompts:
            if not choice.has_room(work) or not choice.add_if_it_fits(work):
                break
        for work in [*self._blocked, *self._batch]:
            if not choice.has_room(work):
                break
            choice.add(work)
        for job in self._jobs:
            work = self._works[job][0]
            if len(choice.works) == MAX_BATCH:
                break
            if job in choice.jobs:
                continue
            if not choice.has_room(work) or not choice.add_if_it_fits(work):
                break
        self._batch_tokens = choice.tokens
        return choice.works


class _Choice:
    """A batch in the making. ``memory``: that of the machine, with all that was chosen."""

    def __init__(self, memory: float) -> None:
        self.memory, self.tokens = memory, 0
        self.works: list[Work] = []
        self.jobs: set[Job] = set()

    def has_room(self, work: Work) -> bool:
        if len(self.works) == MAX_BATCH:
            return False
        return not self.works or self.tokens + work.tokens <= MAX_TOKENS

    def add(self, work: Work) -> None:
        if work.job not in self.jobs:
            self.works.append(work)
            self.jobs.add(work.job)
            self.tokens += work.tokens

    def add_if_it_fits(self, work: Work) -> bool:
        """False: there is no memory. What is in already, or was put aside with its memory, needs none."""
        if work.job in self.jobs:
            return True
        if work.state != "blocked":
            if work.memory + self.memory > MACHINE_BYTES:
                return False
            self.memory += work.memory
        self.add(work)
        return True
