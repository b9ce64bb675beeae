"""A process: what runs in it runs only while it lives, and not while it is frozen; it has a clock of its
own."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from simulation.clock import Event

if TYPE_CHECKING:
    from simulation.world import World


class Killed(BaseException):
    """Ends the turn of a loop whose process has been killed in its middle."""


class Process:
    """Base of the coordinator and the workers. Frozen, it receives the messages that came meanwhile when it
    thaws, in the order of arrival."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        drift = world.scenario.faults.clock_drift
        self._queue = world.queue
        self._clock_offset, self._clock_rate = (
            world.random.uniform(0.0, 1e5),
            1.0 + world.random.uniform(-drift, drift),
        )
        self._frozen_since = self._frozen_until = -1.0
        self._backlog: deque[tuple[Event, tuple[Any, ...]]] = deque()
        self._rest: list[tuple[Event, tuple[Any, ...]]] = []  # of the event in whose middle the process froze
        self._inside = self._waking = False

    @property
    def now(self) -> float:
        """Seconds of this process's own monotonic clock: it began anywhere, and runs a little too fast or too
        slow."""
        return self._clock_offset + self._clock_rate * self._queue.now

    @property
    def frozen(self) -> bool:
        return self._queue.now < self._frozen_until

    @property
    def awake(self) -> bool:
        """Whether it lives and has received all messages."""
        return self.alive and not self.frozen and not self._backlog

    def stands_still(self, seconds: float) -> bool:
        """Whether it has been frozen for ``seconds``."""
        return self.frozen and self._queue.now - self._frozen_since >= seconds

    def poll(self) -> None:
        """Messages have come, or something has happened to a mover: one turn of its loop."""

    def freeze(self, seconds: float) -> None:
        if not self.frozen:
            self._frozen_since = self._queue.now
        self._frozen_until = max(self._frozen_until, self._queue.now + seconds)

    def die(self) -> None:
        self.alive = False
        self._backlog.clear()
        self._rest.clear()

    def after(self, delay: float, event: Event, *args: Any) -> None:
        self._queue.after(delay, self.run, event, *args)

    def run(self, event: Event, *args: Any) -> None:
        """Runs the event in this process as soon as may be. Called from within one of its events, it is a
        part of that event."""
        if not self.alive:
            return
        if self._inside:
            if self._queue.now >= self._frozen_until:
                event(*args)
            else:
                self._rest.append((event, args))
        elif self._backlog or self._queue.now < self._frozen_until:
            self._backlog.append((event, args))
            self._wake_later()
        else:
            self._inside = True
            event(*args)
            self._inside = False
            if self._rest:
                self._stop_in_the_middle()

    def _stop_in_the_middle(self) -> None:
        self._backlog.extendleft(reversed(self._rest))
        self._rest.clear()
        self._wake_later()

    def _wake_later(self) -> None:
        if not self._waking:
            self._waking = True
            self._queue.after(max(0.0, self._frozen_until - self._queue.now), self._thaw)

    def _thaw(self) -> None:
        self._waking = False
        while self._backlog and self.alive and not self.frozen:
            event, args = self._backlog.popleft()
            self._inside = True
            event(*args)
            self._inside = False
            if self._rest:
                self._stop_in_the_middle()
        if self._backlog and self.alive:
            self._wake_later()


class VirtualPid:
    """What this host knows of one of its processes."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def alive(self) -> bool:
        return self._process.alive
