"""How long the stages of one attempt took, by what its workers say of their own durations. Pure; times in seconds of a monotonic clock.

    coordinator   dispatches ............. hears FirstToken ..... hears Joined ..... hears the last token
    workers           queue | prefill | handoff | decode |
    ledger        queue     | prefill | handoff | decode | coordinator

A worker is believed as far as it fits: a stage begins when the one before it ends, and ends before the coordinator hears of it. What is
left of the time then is the coordinator's lateness, but no more of it than has passed since the coordinator had last heard everything
that had been said to it. The rest belongs to the stage: a worker that stood still before it read a message makes nobody else late.
"""

from __future__ import annotations

from typing import NamedTuple

from .time_ledger import TimeLedger


class Heard(NamedTuple):
    """A milestone. ``all_at``: until when the coordinator had heard everything; ``seconds``: what the worker says that it took."""

    at: float
    all_at: float
    seconds: float

    def true_time(self, began: float) -> float:
        """When it happened, of a stage that began then."""
        late = min(self.at - began - _sane(self.seconds), self.at - self.all_at)
        return self.at - late if late > 0.0 else self.at


class AttemptTimes:
    """From one dispatch on, as the newest stages of ``ledger``, whose newest one is "prefill"."""

    def __init__(self, ledger: TimeLedger) -> None:
        self._ledger, self._first_mark = ledger, ledger.num_marks - 1
        self._dispatched = ledger.newest_began
        self._first: Heard | None = None
        self._prefill_s = 0.0
        self._join: Heard | None = None

    def first_token(self, heard: Heard, prefill_s: float) -> None:
        """The prompt is computed; ``heard.seconds``: since the prefill worker had it, ``prefill_s`` of them since its first chunk began."""
        if self._first is None:  # else an echo
            self._first, self._prefill_s = heard, _sane(prefill_s)
            self._lay_out()

    def joined(self, heard: Heard) -> None:
        """``heard.seconds``: since the first token."""
        self._join = heard
        self._lay_out()

    def moved(self) -> None:
        """Another decode worker has it: what was booked until now stays."""
        self._first = self._join = None
        self._first_mark = self._ledger.num_marks

    def ended(self, heard: Heard) -> None:
        """Its last token, in whichever stage it is; ``heard.seconds``: since that stage began."""
        self._ledger.enter("coordinator", heard.true_time(self._ledger.newest_began))

    def _lay_out(self) -> None:
        """Words of two workers come in any order, so all stages are booked anew."""
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


def _sane(seconds: float) -> float:
    """What a worker says may be anything, also not a number."""
    return seconds if 0.0 <= seconds < 1e9 else 0.0
