"""Ends of communicators that are never made, break, hang, or deliver after the transfer was given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from simulation.network import LATE_S

if TYPE_CHECKING:
    from simulation.worker_role import WorkerRole


MEET_S, PARCEL_S = 2.0, 1.5
"""The library's own limits, where it keeps them."""
PATIENCE_S = 2.2
LIMITED = 0.5
"""The share of ends whose library keeps its time limits; the others hang until they are torn down."""
NOTICED = 0.7
"""How often an end sees that its other end is gone."""


class CommunicatorEnd:
    """One of the two ends. ``met``, ``broke`` and ``came`` (a piece) are called as events of its process."""

    def __init__(
        self,
        process: WorkerRole,
        met: Callable[[], None],
        broke: Callable[[str], None],
        came: Callable[[], None],
    ) -> None:
        self.process, self.world, self.met, self.broke, self.came = process, process.world, met, broke, came
        self.number = self.world.next_number()
        self.world.communicator_ends[self.number] = self
        self.other: CommunicatorEnd | None = None
        self.is_torn = False
        self._limit_s, self.busy_since = (
            MEET_S,
            -1.0,
        )  # when it began with what it does now; negative: it does nothing
        self._is_limited, self._is_watched = self.world.random.random() < LIMITED, False
        self.pieces: deque[Piece] = deque()  # that have come, and are not received yet
        self.is_receiving = False  # one of them
        self._newest = 0.0  # when the latest of them comes
        self.begin()

    @property
    def is_alone(self) -> bool:
        """Its other end is there no more."""
        return self.other is None or self.other.is_torn or not self.other.process.alive

    @property
    def hangs(self) -> bool:
        return self.busy_since >= 0.0 and self.process.now > self._began + PATIENCE_S

    def take_entry(self, key: str, value: bytes) -> None:
        """The other end's part of the rendezvous."""
        self.other = self.world.communicator_ends[int(value)]
        if self.other.other is self:
            _meet(self, self.other)

    def tear_down(self) -> None:
        self.is_torn = True

    def join(self, seconds: float) -> None:
        """It has no thread."""

    def has_met(self) -> None:
        if not self.is_torn:
            self._limit_s, self.busy_since = PARCEL_S, -1.0
            self.met()

    def begin(self) -> None:
        """Something that the other end has to take part in."""
        self.busy_since, self._began = self.world.queue.now, self.process.now
        self._watch(self._limit_s)

    def end(self) -> None:
        """That is done."""
        self.busy_since = -1.0

    def give_up(self, reason: str) -> None:
        if not self.is_torn:
            self.broke(reason)

    def arrive(self, piece: Piece) -> None:
        """Later, and in order."""
        world = self.world
        delay = 0.0002 + 0.002 * world.random.random()
        if world.strikes(world.scenario.faults.late_put, "puts late"):
            delay = 0.01 + LATE_S * world.random.random()
        self._newest = max(self._newest, world.queue.now + delay)
        self.process.after(self._newest - world.queue.now, self._arrived, piece)

    def _arrived(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.came()

    def _watch(self, seconds: float) -> None:
        if self._is_limited and not self._is_watched:
            self._is_watched = True
            self.process.after(seconds, self._look)

    def _look(self) -> None:
        self._is_watched = False
        if self.busy_since >= 0.0 and not self.is_torn:
            left = self.busy_since + self._limit_s - self.world.queue.now
            if left > 1e-9:
                self._watch(left)
            else:
                self.broke("the peer did not take part in time")


def _meet(one: CommunicatorEnd, other: CommunicatorEnd) -> None:
    """Both know how the other is reached. Between some pairs of workers it never works; else it may fail now
    and then, and for one end only."""
    world, random = one.world, one.world.random.random
    a, b = sorted((one.process.name, other.process.name))
    walled = Random(f"wall {world.seed} {a} {b}").random() < world.scenario.cluster.walled
    meets = [one, other]
    if walled or world.strikes(world.scenario.faults.failed_rendezvous, "rendezvous failed"):
        world.counts["rendezvous behind a wall"] += walled
        meets = [] if walled else world.random.choice(([], [one], [other]))
    for end in meets:
        end.process.after(0.001 + 0.02 * random() ** 2, end.has_met)


class Piece(NamedTuple):
    """What leaves of a parcel: its layers of each block, and what is to be done once they are received."""

    slices: list[list[int]]
    received: Callable[[], None]
    takes_s: float = 0.0  # more than usual
