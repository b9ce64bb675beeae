"""Where a request's time goes, from its arrival to its last byte. Pure; times in seconds of a monotonic clock.

    parse | queue | prefill | handoff | decode | coordinator | stream
          ^       ^         ^         ^        ^             ^
          only these boundaries are kept

A ledger holds the boundaries between stages, never durations. Whatever is booked, corrected or tried again, the stages therefore sum to the
time from the first boundary to the close.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Stage = Literal["parse", "queue", "prefill", "handoff", "decode", "coordinator", "stream"]


class Stages(NamedTuple):
    """Seconds by stage, over all attempts at a request; they sum to its end-to-end time."""

    parse: float = 0.0  # reading, validating, rendering and tokenizing the request
    queue: float = 0.0  # in the coordinator, and on the prefill worker before its first chunk
    prefill: float = 0.0
    handoff: float = 0.0  # exposed: from the first token to the join on the decode worker
    decode: float = 0.0
    coordinator: float = (
        0.0  # from a worker's last token until the coordinator takes it up: the message's way, and the coordinator's lateness
    )
    stream: float = 0.0  # from the last token until its client has the end of the response

    @property
    def total(self) -> float:
        return sum(self)


NAMES = Stages._fields
_SERVER_TIMING = ", ".join(f"{name};dur=%.3f" for name in (*NAMES, "total")).encode()
_PLACES: dict[Stage, int] = {"parse": 0, "queue": 1, "prefill": 2, "handoff": 3, "decode": 4, "coordinator": 5, "stream": 6}


class Span(NamedTuple):
    """One stay in a stage; a request that was dispatched again has several in the same one."""

    stage: Stage
    begin: float
    end: float


class TimeLedger:
    """One request's time. ``enter`` each stage as it begins, then ``close``; entering another stage after that opens it again."""

    __slots__ = ("_marks", "end")

    def __init__(self, stage: Stage, now: float) -> None:
        self._marks: list[tuple[Stage, float]] = [(stage, now)]
        self.end = now

    @property
    def begin(self) -> float:
        return self._marks[0][1]

    def enter(self, stage: Stage, now: float) -> None:
        """Until now it was the stage before; no boundary lies before an earlier one."""
        self._marks.append((stage, max(now, self._marks[-1][1])))

    def close(self, now: float) -> None:
        """The newest stage has ended."""
        self.end = max(now, self._marks[-1][1])

    @property
    def num_marks(self) -> int:
        """How many boundaries are kept; a later ``rewind`` names one of them."""
        return len(self._marks)

    @property
    def newest_began(self) -> float:
        return self._marks[-1][1]

    def rewind(self, num_marks: int) -> None:
        """Forgets the stages after the first ``num_marks``, of which there is at least one."""
        del self._marks[num_marks:]

    def spans(self) -> Iterator[Span]:
        """In order, without gaps; those that took no time are left out."""
        ends = [began for _, began in self._marks[1:]]
        for (stage, began), ended in zip(self._marks, [*ends, self.end], strict=True):
            if ended > began:
                yield Span(stage, began, ended)

    def stages(self) -> Stages:
        seconds, place, began = [0.0] * len(NAMES), 0, self._marks[0][1]
        for stage, entered in self._marks:
            seconds[place] += entered - began
            place, began = _PLACES[stage], entered
        seconds[place] += self.end - began
        return Stages(*seconds)


def server_timing(stages: Stages, total: float) -> bytes:
    """For the ``Server-Timing`` header: milliseconds by stage, and from arrival to now; https://www.w3.org/TR/server-timing/"""
    return _SERVER_TIMING % (*[1e3 * seconds for seconds in stages], 1e3 * total)
