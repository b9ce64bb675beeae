"""One worker of a sketch: its steps, and the KV blocks that leave it or come to it, in closed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

from ...coordinator.lifecycle.request import Request
from ...coordinator.lifecycle.worker import WorkerRecord
from ...transport.messages.prompt_order import prompt_rank
from ..simulator.events import EventQueue
from .step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Arrival:
    """``num_new``: prompt tokens that no prefix cache has."""

    at_s: float
    num_new: int
    num_prompt: int
    num_output: int


class Coordinator(Protocol):
    """What a worker's messages do there."""

    def first(self, request: Asked) -> None:
        """Its first token has come."""

    def joined(self, request: Asked) -> None:
        """Its decode worker generates."""

    def over(self, request: Asked) -> None:
        """Its last token has come."""

    def lost(self, request: Asked) -> None:
        """Its decode worker had no block for it."""


class Asked(Request):
    """A request, and what has become of it."""

    number: int
    asked: Arrival
    left: int  # tokens to compute
    first: float  # when its first token came; 0: not yet
    since: float  # when it came to ``source``
    source: SketchWorker  # that computes it
    place: SketchWorker  # that generates
    granted_at: float  # -1: it is not offered; inf: not yet
    num_last: int  # tokens of its last chunk, once that is computed
    joined_at: float

    @property
    def num_output(self) -> int:
        return min(self.asked.num_output, self.place.times.memory.max_model_len - self.asked.num_prompt)

    def first_hash(self, worker: WorkerRecord) -> None:
        """Routing knows of no cache."""


@dataclass(slots=True, eq=False)
class SketchWorker:
    number: int
    pool: int
    times: StepTimes
    events: EventQueue
    coordinator: Coordinator
    prompts: list[tuple[tuple[bool, float], int, Asked]] = field(default_factory=list)  # by rank
    pending: int = 0  # tokens of those
    chunks: list[tuple[Asked, int]] = field(default_factory=list)  # of the step, and their tokens
    running: list[tuple[int, int, Asked]] = field(default_factory=list)  # by the step with which they end
    joining: list[Asked] = field(default_factory=list)  # at the end of the step
    offers: list[Asked] = field(default_factory=list)  # no room yet
    begun_at: float = 0.0  # of the steps that run
    due: int = 0  # number of decode steps that run until the next look
    steps: int = 0  # decode steps so far
    context: int = 0  # tokens that the next decode step attends to
    granted: int = 0  # blocks of sequences that have not joined
    busy: bool = False
    version: int = 0  # of the event that ends the running steps
    num_granted: int = 0  # those sequences
    met: set[int] = field(default_factory=set)  # workers that it has sent blocks to
    sent_at: float = 0.0  # the link has sent what there was
    last_at: float = 0.0  # its last put has ended
    received_at: float = 0.0
    checked_at: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def num_steps(self, now: float) -> int:
        """Decode steps that have ended."""
        if self.due < 2 or now <= self.begun_at:
            return self.steps
        return self.steps + self.times.num_steps(now - self.begun_at, len(self.running), self.context) - 1

    def free_blocks(self, now: float) -> int:
        """About: each sequence's last block is half full."""
        num, memory = len(self.running), self.times.memory
        context = self.context + num * (self.num_steps(now) - self.steps)
        return memory.num_blocks - self.granted - context // memory.block_size - num // 2

    def _steps_that_fit(self) -> int:
        """Decode steps until a sequence finds no block."""
        return self.free_blocks(self.begun_at) * self.times.memory.block_size // len(self.running)

    def _has_room_for(self, request: Asked) -> bool:
        num = len(self.running) + len(self.joining)
        if num + self.num_granted >= self.times.max_num_seqs:
            return False
        return self.times.num_blocks(request.num_tokens) + num <= self.free_blocks(self.events.now)

    # --- steps -----------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Something has come that takes part in the next step: of several, the one that runs is the last."""
        if not self.busy:
            self._next()
        elif self.due > 1:
            num, elapsed = len(self.running), self.events.now - self.begun_at
            due = max(1, self.times.num_steps(elapsed, num, self.context))
            if due < self.due:
                self.due = due
                self._ends(self.begun_at + self.times.run_s(due, num, self.context))

    def _ends(self, when: float) -> None:
        self.busy = True
        self.version += 1
        self.events.at(when, self._ended, self.version)

    def _next(self) -> None:
        self.begun_at, running = self.events.now, self.running
        for request in self.joining:
            given = len(request.tokens) + 1
            heappush(running, (self.steps + request.num_output - given, request.number, request))
            self.context += request.asked.num_prompt + given
        self.joining.clear()
        self.due = 0
        if self.prompts:
            self._begin_prompts()
        elif running:
            while (fit := self._steps_that_fit()) < 1 and len(running) > 1:
                self._preempt()
            self.due = max(1, min(running[0][0] - self.steps, fit))
            self._ends(self.events.now + self.times.run_s(self.due, len(running), self.context))

    def _preempt(self) -> None:
        """The youngest sequence leaves."""
        last = max(self.running, key=lambda one: one[2].joined_at)
        self.running.remove(last)
        heapify(self.running)
        request = last[2]
        given = request.num_output - (last[0] - self.steps)
        self.context -= request.asked.num_prompt + given
        request.tokens = [0] * given
        self.events.after(self.times.message_s, self.coordinator.lost, request)

    def _ended(self, version: int) -> None:
        if version != self.version:
            return
        running = self.running
        self.busy = False
        if self.due:
            if not self.chunks:
                self.decode_s += self.events.now - self.begun_at
            self.steps += self.due
            self.context += self.due * len(running)
        if self.chunks:
            self._end_prompts()
        while running and running[0][0] <= self.steps:
            _, _, request = heappop(running)
            self.context -= request.asked.num_prompt + request.num_output
            self.events.after(self.times.message_s, self.coordinator.over, request)
        while self.offers and self._has_room_for(self.offers[0]):
            self._grant(self.offers.pop(0))
        self._next()

    # --- prompts ---------------------------------------------------------------------------------

    def prompt(self, request: Asked) -> None:
        """A prompt has come to its self."""
        request.since = self.events.now
        self.pending += request.left
        self._queue_prompt(request)
        self._interrupt()

    def _queue_prompt(self, request: Asked) -> None:
        """What it has waited is counted from zero, not from now, so that ranks stay comparable."""
        rank = prompt_rank(
            request.num_attempts > 1, request.left, -request.since, self.times.max_batch_tokens
        )
        heappush(self.prompts, (rank, request.number, request))

    def _begin_prompts(self) -> None:
        num_seqs, times = len(self.running), self.times
        budget = most = max(times.max_batch_tokens - num_seqs, times.least_prompt_tokens)
        reads, cached = 0, 0
        while self.prompts and budget:
            _, _, request = heappop(self.prompts)
            left = request.left
            count = left if left < budget else budget
            start = request.num_tokens - left
            reads += count * start + count * (count + 1) // 2
            cached += start
            budget -= count
            if request.granted_at < 0:
                request.place._offered(request)
            self.chunks.append((request, count))
        seconds = times.prompts_s(most - budget, reads, len(self.chunks), cached)
        if num_seqs:
            seconds = times.both_s(seconds, num_seqs, self.context)
            self.due = 1
        self.prefill_s += seconds
        self._ends(self.events.now + seconds)

    def _end_prompts(self) -> None:
        chunks, self.chunks = self.chunks, []
        for request, count in chunks:
            request.left -= count
            self.pending -= count
            if request.left:
                self._queue_prompt(request)
                continue
            self.events.after(self.times.message_s, self.coordinator.first, request)
            if len(request.tokens) + 1 >= request.num_output:
                self.events.after(self.times.message_s, self.coordinator.over, request)
                request.place._withdraw(request)
                continue
            request.num_last = count
            if request.granted_at < inf:
                self._send(request)

    # --- the handoff -----------------------------------------------------------------------------

    def _offered(self, request: Asked) -> None:
        """Grant it blocks, once there is room."""
        if not self.offers and self._has_room_for(request):
            self._grant(request)
        else:
            request.granted_at = inf
            self.offers.append(request)

    def _grant(self, request: Asked) -> None:
        request.granted_at = self.events.now
        self.num_granted += 1
        self.granted += self.times.num_blocks(request.num_tokens)
        if request.num_last:
            request.source._send(request)

    def _withdraw(self, request: Asked) -> None:
        """It needs no blocks, or has joined."""
        if request.granted_at == inf:
            self.offers.remove(request)
        else:
            self.num_granted -= 1
            self.granted -= self.times.num_blocks(request.num_tokens)

    def _send(self, request: Asked) -> None:
        """It is computed: the rest of its blocks leaves, and all are checked there. A link sends one put at
        a time and receives one at a time."""
        place, times = request.place, self.times
        if place is self:
            joins_at = self.events.now + 3 * times.message_s + times.handoff.join_s
        else:
            num_blocks = times.num_blocks(request.num_tokens)
            is_known = place.number in self.met
            all_s, last_s = times.puts_s(num_blocks, times.num_blocks(request.num_last), is_known)
            self.met.add(place.number)
            granted_at = request.granted_at + 2 * times.message_s
            self.sent_at = max(self.sent_at, granted_at) + all_s
            place.received_at = max(place.received_at, granted_at) + all_s
            self.last_at = max(self.last_at, self.events.now) + last_s
            arrived_at = max(self.sent_at, place.received_at, self.last_at) + times.message_s
            place.checked_at = max(place.checked_at, arrived_at) + place.times.check_s(num_blocks)
            joins_at = place.checked_at + place.times.handoff.join_s
        self.events.at(joins_at, place._joins, request)

    def _joins(self, request: Asked) -> None:
        self._withdraw(request)
        request.joined_at = self.events.now
        self.joining.append(request)
        self.events.after(self.times.message_s, self.coordinator.joined, request)
        self._interrupt()
