"""A request's time by stage, from its arrival to its last byte. Pure; seconds of a monotonic clock.

    parse | queue | prefill | handoff | decode | coordinator | stream

A ledger keeps the boundaries between stages, never durations. Whatever is entered, corrected or tried again,
the stages therefore sum to the time from the first boundary to the close.

Workers report how long their stages took:

    coordinator   sends Prefill .......... gets FirstToken ..... gets Joined ..... gets the last token
    workers           queue | prefill | handoff | decode |
    ledger        queue     | prefill | handoff | decode | coordinator

A report is used as far as it fits: a stage begins when the one before it ends, and ends before its message
arrives. The time that is left was lost by the coordinator, but no more of it than has passed since it had
last read all its messages. The rest belongs to the stage: a worker that stood still before it read a message
makes no one else late.
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
    coordinator: float = 0.0  # from the last token on its worker until the coordinator reads it
    stream: float = 0.0  # from the last token until its client has the end of the response

    @property
    def total(self) -> float:
        return sum(self)


NAMES = Stages._fields
MIN_STALL_S = 0.2
"""Ticks come at least ten times a second: a shorter pause is no stall."""
_SERVER_TIMING = ", ".join(f"{name};dur=%.3f" for name in (*NAMES, "total")).encode()
_PLACES: dict[Stage, int] = {
    "parse": 0,
    "queue": 1,
    "prefill": 2,
    "handoff": 3,
    "decode": 4,
    "coordinator": 5,
    "stream": 6,
}


class Span(NamedTuple):
    """One stay in a stage. A request that was dispatched again has several in the same stage."""

    stage: Stage
    begin: float
    end: float


class TimeLedger:
    """One request's time. ``enter`` each stage as it begins, then ``close``. Entering a stage later opens
    it again."""

    __slots__ = ("_marks", "end")

    def __init__(self, stage: Stage, now: float) -> None:
        self._marks: list[tuple[Stage, float]] = [(stage, now)]
        self.end = now

    @property
    def begin(self) -> float:
        return self._marks[0][1]

    def enter(self, stage: Stage, now: float) -> None:
        """Begin a stage; the one before it ends. No boundary lies before an earlier one."""
        self._marks.append((stage, max(now, self._marks[-1][1])))

    def close(self, now: float) -> None:
        """End the newest stage."""
        self.end = max(now, self._marks[-1][1])

    @property
    def num_marks(self) -> int:
        """Number of boundaries, for a later ``rewind``."""
        return len(self._marks)

    @property
    def newest_began(self) -> float:
        return self._marks[-1][1]

    def rewind(self, num_marks: int) -> None:
        """Forget all but the first ``num_marks`` boundaries; at least one stays."""
        del self._marks[num_marks:]

    def spans(self) -> Iterator[Span]:
        """Yield the stays in order, without gaps; empty ones are left out."""
        ends = [began for _, began in self._marks[1:]]
        for (stage, began), ended in zip(self._marks, [*ends, self.end], strict=True):
            if ended > began:
                yield Span(stage, began, ended)

    def stages(self) -> Stages:
        """Return the seconds by stage."""
        seconds, place, began = [0.0] * len(NAMES), 0, self._marks[0][1]
        for stage, entered in self._marks:
            seconds[place] += entered - began
            place, began = _PLACES[stage], entered
        seconds[place] += self.end - began
        return Stages(*seconds)


def server_timing(stages: Stages, total: float) -> bytes:
    """Return the ``Server-Timing`` header: milliseconds by stage, and ``total`` since arrival
    (w3.org/TR/server-timing)."""
    return _SERVER_TIMING % (*[1e3 * seconds for seconds in stages], 1e3 * total)


class Milestone(NamedTuple):
    """A worker's message that ends a stage."""

    at: float  # when it arrived
    read_all_at: float  # the coordinator had last read all its messages then
    seconds: float  # length of the stage, as the worker measured it

    def true_time(self, began: float) -> float:
        """Return when it happened, for a stage that began at ``began``."""
        late = min(self.at - began - _sane(self.seconds), self.at - self.read_all_at)
        return self.at - late if late > 0.0 else self.at


class AttemptTimes:
    """Books one attempt's milestones as the newest stages of ``ledger``, whose newest stage is "prefill"."""

    def __init__(self, ledger: TimeLedger) -> None:
        self._ledger, self._first_mark = ledger, ledger.num_marks - 1
        self._dispatched = ledger.newest_began
        self._first: Milestone | None = None
        self._prefill_s = 0.0
        self._join: Milestone | None = None

    def first_token(self, milestone: Milestone, prefill_s: float) -> None:
        """Book the first token. ``milestone.seconds``: since the prefill worker got the prompt;
        ``prefill_s``: since its first chunk began."""
        if self._first is None:  # else a repeated message
            self._first, self._prefill_s = milestone, _sane(prefill_s)
            self._rebook()

    def joined(self, milestone: Milestone) -> None:
        """Book the join. ``milestone.seconds``: since the first token."""
        self._join = milestone
        self._rebook()

    def moved(self) -> None:
        """Keep what was booked until now: another decode worker runs the sequence."""
        self._first = self._join = None
        self._first_mark = self._ledger.num_marks

    def ended(self, milestone: Milestone) -> None:
        """Book the last token, in whichever stage it came. ``milestone.seconds``: since that stage began."""
        self._ledger.enter("coordinator", milestone.true_time(self._ledger.newest_began))

    def _rebook(self) -> None:
        """Book all stages anew, since messages of two workers come in any order."""
        ledger, first, join = self._ledger, self._first, self._join
        if self._first_mark >= ledger.num_marks:
            return  # it has moved meanwhile
        ledger.rewind(self._first_mark)
        if first is not None:
            computed = first.true_time(self._dispatched)
            if join is not None:
                computed = min(computed, join.at - _sane(join.seconds))
            ledger.enter("prefill", max(self._dispatched, computed - self._prefill_s))
            ledger.enter("handoff", computed)
        else:
            ledger.enter("prefill", self._dispatched)
            if join is not None:
                ledger.enter("handoff", join.at - _sane(join.seconds))
        if join is not None:
            ledger.enter("decode", join.at if first is None else join.true_time(ledger.newest_began))


class OwnStalls:
    """Detects, by its own late ticks, that the coordinator stood still, and charges that time to the
    coordinator.

    After a stall of ``s`` seconds messages are still arriving late for another ``s``: ZeroMQ's thread stood
    still too.
    """

    def __init__(self, late_tick_s: float) -> None:
        """``late_tick_s``: a tick that comes later than this after the last one means a stall."""
        self._late_tick_s = late_tick_s
        self._last_tick: float | None = None
        self._caught_up_at = 0.0
        self._resumed_at = float("-inf")
        self.read_all_at = float("-inf")  # every message sent before then has been read

    def tick(self, now: float) -> float:
        """Note a tick, after all messages that have arrived were read. Return the seconds of a stall; 0.0:
        there was none."""
        stall = now - self._last_tick if self._last_tick is not None else 0.0
        stalled = stall > self._late_tick_s
        if stalled:
            self._resumed_at, self._caught_up_at = now, now + stall
        if now >= self._caught_up_at:
            self.read_all_at = now
        self._last_tick = now
        return stall if stalled else 0.0

    def milestone(self, seconds: float, now: float) -> Milestone:
        """Return the milestone of a message that arrives ``now``; ``seconds``: see ``Milestone``."""
        return Milestone(now, self.read_all_at, seconds)

    def book(self, ledger: TimeLedger, stage: Stage, now: float) -> None:
        """Charge to the coordinator the part of ``stage``, the newest one, that its last stall took."""
        began, ended = self.read_all_at, self._resumed_at
        if ended < began:
            ended = now
        if MIN_STALL_S < ended - began < float("inf") and ledger.newest_began < ended:
            ledger.enter("coordinator", began)
            ledger.enter(stage, ended)


def _sane(seconds: float) -> float:
    """Return 0.0 for a duration that no worker can mean, such as a NaN."""
    return seconds if 0.0 <= seconds < 1e9 else 0.0
