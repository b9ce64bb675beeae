"""A request of a sketch, and what its workers and the coordinator are to one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...coordinator.lifecycle.request import Request
from ...coordinator.lifecycle.worker import WorkerRecord
from ..simulator.events import EventQueue
from .sketched_blocks import SketchBlocks
from .step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Arrival:
    """``num_new``: prompt tokens that no prefix cache has."""

    at_s: float
    num_new: int
    num_prompt: int
    num_output: int


class Coordinator(Protocol):
    """Its methods are called when the message has come."""

    is_exact: bool  # False: something has come that only the simulator knows, such as a timeout

    def first(self, request: Asked) -> None: ...
    def joined(self, request: Asked) -> None: ...
    def over(self, requests: Sequence[Asked]) -> None: ...
    def lost(self, request: Asked) -> None: ...
    def refused(self, request: Asked) -> None: ...
    def reported(self, worker: Place, num_free: int) -> None: ...


class Place(Protocol):
    """A worker, as its parts and other workers see it."""

    number: int
    times: StepTimes
    events: EventQueue
    coordinator: Coordinator
    blocks: SketchBlocks
    begun_at: float  # of the steps that run
    ends_at: float
    due: int  # number of decode steps that run until the next look
    steps: int  # decode steps so far
    context: int  # tokens that the next decode step attends to
    version: int  # of the event that ends the running steps
    received_at: float  # the puts to it
    checked_at: float  # their blocks
    activate: Callable[[], None]  # its loop ticks
    turn: Callable[[], None]  # the end of each turn of the loop
    test: Callable[[int], None]
    offered: Callable[[Asked], None]
    granted: Callable[[Asked], None]  # the grant has come to the prompt's source
    joins: Callable[[Asked], None]  # all its blocks are here

    @property
    def num_rows(self) -> int: ...
    def free_blocks(self, now: float) -> int: ...
    def tick(self) -> bool: ...
    def shorten(self) -> None: ...
    def join(self, request: Asked) -> None: ...
    def handed_over(self, request: Asked, num_blocks: int) -> None: ...


class Asked(Request):
    """A request, and what has become of it."""

    __slots__ = (
        "asked", "begins", "begun", "first", "joined_at", "left", "num_kept", "number", "place", "since",
        "source",
    )  # fmt: skip
    number: int
    asked: Arrival
    left: int  # tokens to compute
    first: float  # when its first token came; 0: not yet
    since: float  # when it came to ``source``
    source: Place  # that computes it
    place: Place  # that generates
    begun: bool  # it has its blocks at ``source``
    num_kept: int  # of its blocks, which need not travel
    joined_at: float
    begins: int  # number of a step, modulo the size of a block, with which it begins a block

    @property
    def num_output(self) -> int:
        return self.sampling.max_tokens

    @property
    def goes_on(self) -> bool:
        """Whether another token follows the one that is computed with the prompt."""
        return len(self.tokens) + 1 < self.num_output

    def first_hash(self, worker: WorkerRecord) -> None:
        """Routing knows of no cache."""
