"""What a part reports, a line each: a check, a figure with or without a goal, or what it left out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels.gpu_timing import Ceilings, Figure

MACHINE_FILE = "machine.json"
"""In the work folder: what the part "machine" found."""


@dataclass(frozen=True, slots=True)
class Line:
    """``value`` is in ``unit``; "share" is a fraction, shown in percent. ``good`` is of checks alone;
    ``headline`` puts a figure without a goal into the summary."""

    what: str
    good: bool | None = None
    value: float | None = None
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    headline: bool = False
    left_out: bool = False
    note: str = ""

    @property
    def has_goal(self) -> bool:
        return self.at_least is not None or self.at_most is not None

    @property
    def met(self) -> bool:
        """False for a value that is not a number, too."""
        low, high, value = self.at_least, self.at_most, self.value
        return value is not None and (low is None or value >= low) and (high is None or value <= high)

    @property
    def goal(self) -> str:
        if self.at_least is not None:
            return f">= {shown(self.at_least, self.unit)}"
        return f"<= {shown(self.at_most, self.unit)}" if self.at_most is not None else ""

    def __str__(self) -> str:
        mark = "left out" if self.left_out else {True: "ok   ", False: "WRONG", None: "     "}[self.good]
        value = "" if self.value is None else shown(self.value, self.unit)
        return " ".join(filter(None, (mark, self.what, value, self.goal, self.note)))


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if unit == "share" else f"{value:.4g} {unit}".rstrip()


def left_out(what: str, why: str) -> Line:
    return Line(what, left_out=True, note=why)


def checked(what: str, error: float, allowed: float, note: str = "") -> Line:
    """A check by its error, which must not exceed ``allowed``."""
    return Line(
        what,
        good=error <= allowed,
        value=error,
        unit="error",
        note=note or (f"allowed {allowed:g}" if error > allowed else ""),
    )


def figure_line(figure: Figure) -> Line:
    """A time as the share that its floor is of it."""
    return Line(
        figure.what,
        value=figure.ratio,
        unit="share",
        at_least=figure.goal,
        note=f"{figure.us:.1f} us, {figure.rate / 1e12:.3f} T{figure.unit}/s",
    )


def read_lines(file: Path) -> list[Line]:
    """Those that were written whole; a process that is killed may leave half a line."""
    if not file.exists():
        return []
    known = {field.name for field in fields(Line)}
    text = file.read_text(errors="replace")
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [
        Line(**{name: value for name, value in json.loads(line).items() if name in known}) for line in whole
    ]


def as_json(lines: Iterable[Line]) -> list[dict[str, object]]:
    """Without the fields that have their defaults."""
    defaults = {field.name: field.default for field in fields(Line)}
    return [
        {name: value for name, value in asdict(line).items() if value != defaults[name]} for line in lines
    ]


@dataclass(frozen=True, slots=True)
class Place:
    """Device and sizes of a part, and the folder that all parts share. ``big``: sizes for a GPU; else for a
    rehearsal on the CPU."""

    device: str
    big: bool
    work: Path

    def ceilings(self) -> Ceilings:
        """Those that the part "machine" measured, or new ones."""
        from ..kernels.gpu_timing import Ceilings, measure_ceilings

        file = self.work / "ceilings.json"
        if file.exists():
            return Ceilings(**json.loads(file.read_text()))
        return measure_ceilings(self.device)
