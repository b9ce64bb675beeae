"""One page on a run: first what is wrong, then each figure beside its goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .line import Line, shown
from .plan import Part

MOST_LINES, WIDTH = 12, 150  # findings of one part; characters


class State(Enum):
    WAITING, RUNNING, OVER, FAILED, NOT_RUN = "waiting", "running", "over", "failed", "not run"


@dataclass
class Outcome:
    """``why``: how the part's process failed, if it did; ``log``: the end of its log then."""

    part: Part
    state: State
    seconds: float = 0.0
    why: str = ""
    log: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        return self.state is State.FAILED or any(line.good is False for line in self.lines)

    def one_line(self) -> str:
        wrong = sum(line.good is False for line in self.lines)
        right = sum(line.good is True for line in self.lines)
        found = f"{len(self.lines)} lines, {right} right" + (f", {wrong} WRONG" if wrong else "")
        state = f"FAILED: {self.why}" if self.why else self.state.value
        return f"{self.part.name:15s} {self.seconds:6.1f} s  {found}  {state}"


def summary(
    outcomes: Sequence[Outcome], environment: Mapping[str, object], took_s: float, of_s: float
) -> str:
    """In plain text."""
    where = ", ".join(
        f"{name} {environment[name]}"
        for name in ("gpu", "torch", "triton", "commit", "date")
        if name in environment
    )
    sections = (
        ("WRONG", list(_wrong(outcomes))),
        ("NOT RUN, for want of time", [o.part.name for o in outcomes if o.state is State.NOT_RUN]),
        ("UNDER WAY", [o.part.name for o in outcomes if o.state is State.RUNNING]),
        ("LEFT OUT", [f"{line.what}: {line.note}" for line in _lines(outcomes) if line.left_out]),
        ("MISSED THEIR GOAL", [_beside(line) for line in _lines(outcomes) if line.has_goal and not line.met]),
        ("MET THEIR GOAL", [_beside(line) for line in _lines(outcomes) if line.has_goal and line.met]),
        ("FIGURES WITHOUT A GOAL", [_beside(line) for line in _lines(outcomes) if line.headline]),
        ("PARTS", [o.one_line() for o in outcomes if o.state in (State.OVER, State.FAILED)]),
    )
    text = [f"gpu_check: {where or 'a rehearsal'}; {took_s:.0f} s of {of_s:.0f} s"]
    for title, rows in sections:
        if rows or title == "WRONG":
            text += ["", f"{title} ({len(rows)})" if rows else "NOTHING IS WRONG SO FAR"]
            text += [f"  {row[:WIDTH]}" for row in rows]
    return "\n".join(text) + "\n"


def _wrong(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        name = outcome.part.name
        wrong = [line for line in outcome.lines if line.good is False]
        for line in wrong[:MOST_LINES]:
            yield f"{name}: {line.what} {shown(line.value, line.unit)} {line.note}"
        if len(wrong) > MOST_LINES:
            yield f"{name}: and {len(wrong) - MOST_LINES} more, see results.json"
        if outcome.why:
            last = next((text for text in reversed(outcome.log) if text.strip()), "nothing in its log")
            yield f"{name}: {outcome.why}; the log ends: {last.strip()}"


def _lines(outcomes: Sequence[Outcome]) -> Iterator[Line]:
    for outcome in outcomes:
        yield from outcome.lines


def _beside(line: Line) -> str:
    return f"{shown(line.value, line.unit):>12s} {line.goal:10s} {line.what}  {line.note}"
