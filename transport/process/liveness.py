"""Whether a certain process of this machine is still there; a process id alone may have been given to another
since.

This reads /proc itself: psutil returns start times since the epoch, from the machine's boot time, which it
reads each time anew. If the clock has been set since (a virtual machine that was resumed), a running process
would be taken for another one, and the blocks that it still writes would be reused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENDED = frozenset("ZXx")
"""States (proc(5)) of a process of which nothing runs any more, even if its parent has not taken notice
yet."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process by id and start time (clock ticks since this machine's start: no clock that is set can change
    it)."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process that has this id now; None where there is none. Raises OSError where that cannot be
        seen."""
        seen = _look(pid)
        return cls(pid, seen[1]) if seen is not None else None

    def alive(self) -> bool:
        """False once it has ended, a zombie included."""
        try:
            seen = _look(self.pid)
        except OSError:  # no descriptor left, perhaps for a moment only: asked again soon
            return True
        return seen is not None and seen[0] not in ENDED and seen[1] == self.start_time


def _look(pid: int) -> tuple[str, int] | None:
    """(state, start time) of the process that has this id now."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # after its name, which may hold anything
    return fields[0], int(fields[19])
