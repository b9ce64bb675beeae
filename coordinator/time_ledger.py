"""Where a request's time goes, from its arrival to its last byte. Pure; times in seconds of a monotonic clock.

    parse | queue | prefill | handoff | decode | stream
          ^       ^         ^         ^        ^
          only these boundaries are kept

A ledger holds the boundaries between stages, never durations. Whatever is booked, corrected or tried again, the stages therefore sum to the
time from the first boundary to the close.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Stage = Literal["parse", "queue", "prefill", "handoff", "decode", "stream"]


class Stages(NamedTuple):
    """Seconds by stage, over all attempts at a request; they sum to its end-to-end time."""

    parse: float = 0.0  # reading, validating, rendering and tokenizing the request
    queue: float = 0.0  # in the coordinator, and on the prefill worker before its first chunk
    prefill: float = 0.0
    handoff: float = 0.0  # exposed: from the first token to the join on the decode worker
    decode: float = 0.0
    stream: float = 0.0  # from the last token until its client has the end of the response

    @property
    def total(self) -> float:
        return sum(self)


NAMES = Stages._fields
_PLACES: dict[Stage, int] = {"parse": 0, "queue": 1, "prefill": 2, "handoff": 3, "decode": 4, "stream": 5}


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

    def previous_began_later(self, seconds: float) -> None:
        """The stage before the newest one began so much later: until then it was the one before it."""
        (stage, began), (_, ended) = self._marks[-2:]
        self._marks[-2] = (stage, min(began + max(0.0, seconds), ended))

    def previous_was(self, stage: Stage, seconds: float) -> None:
        """The newest stage follows upon at least so much of ``stage``, which is taken from what came before that."""
        _, began = self._marks[-1]
        if len(self._marks) < 2 or self._marks[-2][0] != stage:
            self._marks.insert(-1, (stage, began))
        if len(self._marks) > 2:
            (_, earliest), (_, known) = self._marks[-3:-1]
            self._marks[-2] = (stage, max(earliest, min(known, began - seconds)))

    def spans(self) -> Iterator[Span]:
        """In order, without gaps; those that took no time are left out."""
        ends = [began for _, began in self._marks[1:]]
        for (stage, began), ended in zip(self._marks, [*ends, self.end], strict=True):
            if ended > began:
                yield Span(stage, began, ended)

    def stages(self) -> Stages:
        seconds, place, began = [0.0] * 6, 0, self._marks[0][1]
        for stage, entered in self._marks:
            seconds[place] += entered - began
            place, began = _PLACES[stage], entered
        seconds[place] += self.end - began
        return Stages(*seconds)


def server_timing(stages: Stages, total: float) -> bytes:
    """For the ``Server-Timing`` header: milliseconds by stage, and from arrival to now; https://www.w3.org/TR/server-timing/"""
    return (b"parse;dur=%.3f, queue;dur=%.3f, prefill;dur=%.3f, handoff;dur=%.3f, decode;dur=%.3f, stream;dur=%.3f, total;dur=%.3f") % (
        *[1e3 * seconds for seconds in stages],
        1e3 * total,
    )
