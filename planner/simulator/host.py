"""A host: what its workers share slows a step down while others compute beside it.

A step's end moves whenever a neighbour's step begins or ends: what is left of it then goes on at the new
pace, as in processor sharing. The loop around a step slows nobody and is not slowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...engine.latency_profile import Contention, StepRole
from .events import EventQueue


@dataclass(slots=True, eq=False)
class HostedStep:
    """A step that runs here. ``ends_at``: if its neighbours go on as they are; ``slowdown``: times as long as
    alone, now."""

    role: StepRole
    contention: Contention
    ends_at: float
    on_moved: Callable[[float, float], None]
    on_done: Callable[[], None]
    slowdown: float = 1.0
    over: bool = False


class Host:
    """Several devices' steps."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._computing: list[HostedStep] = []

    def begin(
        self,
        role: StepRole,
        contention: Contention,
        loop_s: float,
        seconds: float,
        on_moved: Callable[[float, float], None],
        on_done: Callable[[], None],
    ) -> HostedStep:
        """Begin a step in ``loop_s`` from now that takes ``seconds`` alone. ``on_moved`` is called whenever
        its end moves, with the new end and the difference in seconds."""
        now = self._queue.now
        step = HostedStep(role, contention, now + (loop_s + seconds), on_moved, on_done)
        self._queue.at(step.ends_at, self._end, step, step.ends_at)
        if loop_s > 0:
            self._queue.at(now + loop_s, self._compute, step)
        else:
            self._compute(step)
        return step

    def stop(self, step: HostedStep) -> None:
        """End it now, done or not, without a callback."""
        step.over = True
        if step in self._computing:
            self._computing.remove(step)
            self._set_paces()

    def _compute(self, step: HostedStep) -> None:
        if not step.over:
            self._computing.append(step)
            self._set_paces()

    def _end(self, step: HostedStep, ends_at: float) -> None:
        if not step.over and step.ends_at == ends_at:  # else it has moved since
            self.stop(step)
            step.on_done()

    def _set_paces(self) -> None:
        """What is left of each step takes as long as it does beside those that compute now."""
        now, computing = self._queue.now, self._computing
        num_prefill = sum(step.role == "prefill" for step in computing)
        num_decode = len(computing) - num_prefill
        for step in computing:
            computes = step.role == "prefill"
            slowdown = step.contention.slowdown(
                step.role, num_prefill - computes, num_decode - (not computes)
            )
            if slowdown != step.slowdown:
                before, step.ends_at = step.ends_at, now + (step.ends_at - now) * (slowdown / step.slowdown)
                step.slowdown = slowdown
                self._queue.at(step.ends_at, self._end, step, step.ends_at)
                step.on_moved(step.ends_at, step.ends_at - before)
