"""When a sketched worker's loop ticks and reports: with the first turn after each quarter of a second."""

from __future__ import annotations

from math import inf

from ...coordinator.lifecycle.limits import LifecycleLimits
from ...engine.cache.block_manager import has_spare
from .sketched_request import Place

HEARTBEAT_S = LifecycleLimits().heartbeat_s  # a simulated loop ticks as often


class Heartbeat:
    """``phase``: seconds of the clock at which the loop first ticks."""

    def __init__(self, worker: Place, phase: float) -> None:
        self._worker, self._events, self._phase = worker, worker.events, phase
        self._ticks = False
        self._reported_at = inf  # it does not
        self._generates = False
        self._reported = 0

    def begin(self, generates: bool) -> None:
        """Report from now on: free blocks if the worker generates; else whether some are left."""
        self._reported_at, self._generates = self._events.now, generates
        self._reported = self._news(self._worker.blocks.num_blocks)  # as a new record has it

    def _news(self, num_free: int) -> int:
        return num_free if self._generates else has_spare(num_free, self._worker.blocks.num_blocks)

    def turn(self) -> None:
        """At the end of each turn of the loop."""
        if self._events.now - self._reported_at >= HEARTBEAT_S:
            self._report(self._worker.free_blocks(self._events.now))

    def activate(self) -> None:
        """Tick, as long as there is anything to do."""
        if not self._ticks:
            last = self._phase + (self._events.now - self._phase) // HEARTBEAT_S * HEARTBEAT_S
            if last - self._reported_at >= HEARTBEAT_S:
                self._reported_at = last  # there was nothing new
            self._tick_at(last + HEARTBEAT_S)

    def _tick_at(self, when: float) -> None:
        self._ticks = True
        self._events.at(when, self._tick)

    def _tick(self) -> None:
        worker, now = self._worker, self._events.now
        is_active = worker.tick()
        self.turn()
        self._ticks = False
        if is_active or self._news(worker.free_blocks(now)) != self._reported:
            self._tick_at(now + HEARTBEAT_S)

    def _report(self, num_free: int) -> None:
        worker, self._reported_at = self._worker, self._events.now
        if (news := self._news(num_free)) != self._reported:
            self._reported = news
            self._events.after(worker.times.message_s, worker.coordinator.reported, worker, num_free)
        self.await_step()

    def await_step(self) -> None:
        """Look when the steps that run and follow one another at once come to the next report."""
        worker = self._worker
        due_at = self._reported_at + HEARTBEAT_S
        if worker.due > 1 and worker.begun_at < due_at < worker.ends_at:
            after = due_at - worker.begun_at
            num, context = worker.blocks.num_seqs, worker.context
            if (count := max(1, worker.times.num_steps(after, num, context))) < worker.due:
                at = worker.begun_at + worker.times.run_s(count, num, context)
                self._events.at(at, self._between, worker.version, count)

    def _between(self, version: int, count: int) -> None:
        """This number of the steps has ended."""
        worker = self._worker
        if version == worker.version and self._events.now - self._reported_at >= HEARTBEAT_S:
            self._report(worker.blocks.num_free - worker.blocks.growth(worker.steps, count + 1))
