"""A cluster as DistServe's own simulator models it, quirks included: for comparing with its results, and no
physics.

- A prefill worker joins all prompts that wait, whole and in order, as far as its KV cache could hold; a
  decode worker takes sequences from the head of its line up to a number of context tokens, and puts those
  that go on back at its end: beyond that number they take turns.
- A sequence needs as many decode steps as it has output tokens: the prompt's own token is not counted.
- A new sequence goes to the decode worker with the shortest *line*; those in its running step are not in it,
  so that the first worker gets nearly all until a step of it takes long.
- Each step costs 2 ms more (3 ms with prompts), and 0.1 us for each token in context. KV blocks move in no
  time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...engine.latency_profile import Profile
from ...planner.simulator.events import EventQueue
from ...traces.request import TraceRequest

STEP_S, PROMPT_STEP_S, CONTEXT_TOKEN_S = 2e-3, 3e-3, 1e-7
MOST_CONTEXT_TOKENS = 50_000


@dataclass(slots=True, eq=False)
class Asked:
    """One request; ``*_s``: since it arrived."""

    arrival: float
    num_prompt: int
    num_output: int
    generated: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0

    @property
    def context(self) -> int:
        return self.num_prompt + self.generated

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / self.num_output


@dataclass(slots=True, eq=False)
class _Worker:
    line: deque[Asked] = field(default_factory=deque)
    in_step: int = 0
    busy: bool = False


class DistServeCluster:
    """``num_prefill`` and ``num_decode`` workers with one profile."""

    def __init__(self, profile: Profile, num_prefill: int, num_decode: int) -> None:
        self._profile = profile
        self._prefills = [_Worker() for _ in range(num_prefill)]
        self._decodes = [_Worker() for _ in range(num_decode)]
        self._events = EventQueue()
        self._most_prompt_tokens = profile.memory.num_blocks * profile.memory.block_size

    def run(self, trace: Iterable[TraceRequest]) -> list[Asked]:
        """All requests, done."""
        asked = [Asked(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace]
        for one in asked:
            self._events.at(one.arrival, self._arrive, one)
        self._events.run_while(lambda: True)
        return asked

    def _arrive(self, one: Asked) -> None:
        worker = min(self._prefills, key=lambda w: w.in_step + len(w.line))
        worker.line.append(one)
        self._wake(worker, self._prefill)

    def _wake(self, worker: _Worker, step: Callable[[_Worker], None]) -> None:
        """It begins when everything of this instant has happened."""
        if not worker.busy:
            worker.busy = True
            self._events.at(self._events.now, step, worker)

    def _prefill(self, worker: _Worker) -> None:
        batch: list[Asked] = []
        left = self._most_prompt_tokens
        while worker.line and (worker.line[0].num_prompt <= left or not batch):
            left -= worker.line[0].num_prompt
            batch.append(worker.line.popleft())
        lens = [one.num_prompt for one in batch]
        seconds = self._profile.prefill.seconds(sum(lens), sum(n * (n + 1) / 2 for n in lens), len(lens))
        worker.in_step = len(batch)
        ends_at = self._events.now + seconds + PROMPT_STEP_S + CONTEXT_TOKEN_S * sum(lens)
        self._events.at(ends_at, self._computed, worker, batch)

    def _computed(self, worker: _Worker, batch: list[Asked]) -> None:
        worker.in_step, worker.busy = 0, False
        for one in batch:
            one.ttft_s = self._events.now - one.arrival
            target = min(self._decodes, key=lambda w: len(w.line))
            target.line.append(one)
            self._wake(target, self._decode)
        if worker.line:
            self._wake(worker, self._prefill)

    def _decode(self, worker: _Worker) -> None:
        batch: list[Asked] = []
        left = MOST_CONTEXT_TOKENS
        while worker.line and worker.line[0].context + 1 <= left:
            left -= worker.line[0].context + 1
            batch.append(worker.line.popleft())
        context = sum(one.context for one in batch)
        seconds = self._profile.decode.seconds(len(batch), context + len(batch), len(batch))
        ends_at = self._events.now + seconds + STEP_S + CONTEXT_TOKEN_S * context
        self._events.at(ends_at, self._generated, worker, batch)

    def _generated(self, worker: _Worker, batch: list[Asked]) -> None:
        worker.busy = False
        for one in batch:
            one.generated += 1
            if one.generated < one.num_output:
                worker.line.append(one)
            else:
                one.e2e_s = self._events.now - one.arrival
        if worker.line:
            self._wake(worker, self._decode)
