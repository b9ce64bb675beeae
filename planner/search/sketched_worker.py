"""One worker of a sketch: its steps in closed form, in the order and with the prompts of the live loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ...transport.messages.prompt_order import prompt_rank
from ..simulator.events import EventQueue
from .sketched_blocks import SketchBlocks
from .sketched_handoff import Handoffs
from .sketched_heartbeat import Heartbeat
from .sketched_link import Grants
from .sketched_request import Asked, Coordinator, Place
from .step_times import StepTimes

MAX_PROMPTS = 64  # in a step
STARVING_S = 2.0  # after which a prompt that waits for blocks keeps others from them


class SketchWorker:
    __slots__ = (
        "_busy", "_num_begun", "activate", "begun_at", "blocks", "checked_at", "chunks", "context",
        "coordinator", "decode_s", "due", "ends_at", "events", "granted", "grants", "handoffs",
        "heartbeat", "joining", "joins", "number", "offered", "pool", "prefill_s", "prompts",
        "received_at", "running", "steps", "test", "times", "turn", "version",
    )  # fmt: skip

    def __init__(
        self, number: int, pool: int, times: StepTimes, events: EventQueue, coordinator: Coordinator,
        phase: float,
    ) -> None:  # fmt: skip
        """``phase``: see ``Heartbeat``."""
        self.number, self.pool, self.times, self.events = number, pool, times, events
        self.coordinator = coordinator
        self.blocks = SketchBlocks(times.memory.num_blocks, times.memory.block_size)
        self.handoffs, self.grants, self.heartbeat = Handoffs(self), Grants(self), Heartbeat(self, phase)
        self.activate: Callable[[], None] = self.heartbeat.activate
        self.turn: Callable[[], None] = self.heartbeat.turn
        self.granted: Callable[[Asked], None] = self.handoffs.granted
        self.test: Callable[[int], None] = self.grants.test
        self.offered: Callable[[Asked], None] = self.grants.offered
        self.joins: Callable[[Asked], None] = self.grants.joins
        self.received_at = self.checked_at = 0.0
        self.prompts: list[tuple[tuple[bool, float], int, Asked]] = []  # by rank
        self.chunks: list[tuple[Asked, int]] = []  # of the step, and their tokens
        self.running: list[tuple[int, int, Asked]] = []  # by the step with which they end
        self.joining: list[Asked] = []  # at the end of the step
        self.begun_at = self.ends_at = 0.0  # of the steps that run
        self.due = 0  # number of decode steps that run until the next look
        self.steps = 0  # decode steps so far
        self.context = 0  # tokens that the next decode step attends to
        self._num_begun = 0  # prompts that have their blocks here
        self._busy = False
        self.version = 0  # of the event that ends the running steps
        self.prefill_s = self.decode_s = 0.0

    @property
    def num_rows(self) -> int:
        return len(self.running) + len(self.joining)

    def num_steps(self, now: float) -> int:
        """Decode steps that have ended."""
        return self.steps + self._step_at(now) - 1 if self.due > 1 else self.steps

    def free_blocks(self, now: float) -> int:
        num_free = self.blocks.num_free
        return num_free - self.blocks.growth(self.steps, self._step_at(now)) if self.due else num_free

    def _step_at(self, now: float) -> int:
        """Which of the decode steps runs now: 1 is the first."""
        if self.due < 2 or now <= self.begun_at:
            return 1
        return min(self.due, self.times.num_steps(now - self.begun_at, len(self.running), self.context))

    def tick(self) -> bool:
        """Return whether there is anything to do."""
        self.grants.grant_waiting()
        self.handoffs.tick()
        has_work = self._busy or self.prompts or self.num_rows
        return bool(has_work or self.grants.is_active or self.handoffs.open)

    # --- steps -----------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Something has come that takes part in the next step: of several, the one that runs is the last."""
        if not self._busy:
            self._next()
        elif self.due > 1 and (due := self._step_at(self.events.now)) < self.due:
            self.due = due
            self._ends(self.begun_at + self.times.run_s(due, len(self.running), self.context))

    def _ends(self, when: float) -> None:
        self._busy, self.ends_at = True, when
        self.version += 1
        self.events.at(when, self._ended, self.version)

    def _next(self) -> None:
        self.begun_at, running = self.events.now, self.running
        for request in self.joining:
            given = len(request.tokens) + 1
            heappush(running, (self.steps + request.num_output - given, request.number, request))
            self.context += request.asked.num_prompt + given
            request.begins = self.blocks.enter(self.steps, request.num_tokens)
        self.joining.clear()
        while running and not self.blocks.steps_that_fit(self.steps, 1):
            self._preempt()
        self.due = 1 if running else 0  # their blocks come before those of prompts
        if self.prompts and self._begin_prompts():
            return
        if running:
            self.due = max(1, self.blocks.steps_that_fit(self.steps, running[0][0] - self.steps))
            self._ends(self.events.now + self.times.run_s(self.due, len(running), self.context))
            self.heartbeat.await_step()

    def _preempt(self) -> None:
        """The youngest sequence leaves."""
        last = max(self.running, key=lambda one: one[2].joined_at)
        self.running.remove(last)
        heapify(self.running)
        request = last[2]
        given = request.num_output - (last[0] - self.steps)
        self._leave(request, given)
        request.tokens = [0] * given
        self.events.after(self.times.message_s, self.coordinator.lost, request)

    def _leave(self, request: Asked, num_output: int) -> None:
        """It has this number of tokens now, and is in no further step."""
        num_tokens = request.asked.num_prompt + num_output
        self.context -= num_tokens
        self.blocks.leave(request.begins, num_tokens - 1)

    def _ended(self, version: int) -> None:
        if version != self.version:
            return
        running, over = self.running, list[Asked]()
        self._busy = False
        if self.due:
            if not self.chunks:
                self.decode_s += self.events.now - self.begun_at
            self.blocks.num_free -= self.blocks.growth(self.steps, self.due)
            self.steps += self.due
            self.context += self.due * len(running)
            self.due = 0
        if self.chunks:
            self._end_prompts()
        while running and running[0][0] <= self.steps:
            request = heappop(running)[2]
            self._leave(request, request.num_output)
            over.append(request)
        if over:
            self.events.after(self.times.message_s, self.coordinator.over, over)
            self.grants.grant_waiting()
        self._next()
        self.turn()

    # --- prompts ---------------------------------------------------------------------------------

    def receive(self, requests: list[Asked]) -> None:
        """Prompts have come, together; they are taken off the list."""
        self.activate()
        for request in requests:
            request.since = self.events.now
            if self.blocks.num_for(request.num_tokens) <= min(
                self.blocks.num_blocks, request.place.blocks.num_blocks
            ):
                self._queue_prompt(request)
            else:
                self.events.after(self.times.message_s, self.coordinator.refused, request)
        requests.clear()
        self._interrupt()
        self.handoffs.turn()
        self.turn()

    def _queue_prompt(self, request: Asked) -> None:
        """What it has waited is counted from zero, not from now, so that ranks stay comparable."""
        rank = prompt_rank(
            request.num_attempts > 1, request.left, -request.since, self.times.max_batch_tokens
        )
        heappush(self.prompts, (rank, request.number, request))

    def _begin_prompts(self) -> bool:
        """Return whether there is room for any."""
        num_seqs, times = len(self.running), self.times
        budget = most = max(times.max_batch_tokens - num_seqs, times.least_prompt_tokens)
        reads, cached, later, is_starved = 0, 0, list[tuple[tuple[bool, float], int, Asked]](), False
        crowding = _crowding(self)
        while self.prompts and budget and len(self.chunks) < MAX_PROMPTS:
            one = heappop(self.prompts)
            request = one[2]
            if not request.begun and (is_starved or request.place in crowding or not self._begin(request)):
                waited_s = self.events.now - request.since
                is_starved = is_starved or (request.place not in crowding and waited_s > STARVING_S)
                later.append(one)
                continue
            left = request.left
            count = left if left < budget else budget
            start = request.num_tokens - left
            reads += count * start + count * (count + 1) // 2
            cached += start
            budget -= count
            self.chunks.append((request, count))
        for one in later:
            heappush(self.prompts, one)
        if not self.chunks:
            return False
        seconds = times.prompts_s(most - budget, reads, len(self.chunks), cached)
        self.handoffs.step_begins(self.chunks, seconds - times.prefill_loop_s)
        if num_seqs:
            seconds = times.both_s(seconds, num_seqs, self.context)
        self.prefill_s += seconds
        self._ends(self.events.now + seconds)
        return True

    def _begin(self, request: Asked) -> bool:
        """Give it its blocks, if there is room, and offer it to another worker."""
        num_blocks = self.blocks.num_for(request.num_tokens)
        left = len(self.running) + self._num_begun + 1 if request.place is self else 0
        if num_blocks + left > self.free_blocks(self.events.now):
            return False
        self.blocks.num_free -= num_blocks
        request.begun = True
        self._num_begun += 1
        if request.place is not self and request.goes_on:
            self.handoffs.begin(request)
        return True

    def _end_prompts(self) -> None:
        chunks, self.chunks = self.chunks, []
        for request, count in chunks:
            request.left -= count
            if request.left:
                self._queue_prompt(request)
                self.handoffs.chunk_done(request)
                continue
            self.events.after(self.times.message_s, self.coordinator.first, request)
            if not request.goes_on:
                self.blocks.num_free += self.blocks.num_for(request.num_tokens)
                self._num_begun -= 1
                continue
            if request.place is self:
                self.handoffs.begin(request)
            self.handoffs.chunk_done(request)

    # --- the handoff -----------------------------------------------------------------------------

    def join(self, request: Asked) -> None:
        request.joined_at = self.events.now
        self.joining.append(request)
        self._interrupt()
        self.turn()

    def shorten(self) -> None:
        """There are fewer blocks for the steps that run."""
        if self.due > 1 and self.blocks.steps_that_fit(self.steps, self.due) < self.due:
            self._interrupt()

    def handed_over(self, request: Asked, num_blocks: int) -> None:
        """Its handoff is over: this number of its blocks here is free."""
        del self.handoffs.open[request]
        self.handoffs.turn()
        self.blocks.num_free += num_blocks
        self._num_begun -= 1
        if self.prompts and not self._busy:
            self._next()


def _crowding(worker: SketchWorker) -> set[Place]:
    """Return the places whose computed prompts fill half of the blocks while prompts for others wait."""
    half, waiting, kept = worker.blocks.num_blocks // 2, set[Place](), Counter[Place]()
    if worker.prompts and worker.blocks.num_blocks - worker.blocks.num_free >= half:
        waiting = {request.place for *_, request in worker.prompts if not request.begun}
    for handoff in worker.handoffs.open.values() if len(waiting) > 1 else ():
        kept[handoff.contact.place] += handoff.num_blocks if handoff.is_computed else 0
    return {place for place, num_blocks in kept.items() if num_blocks >= half}
