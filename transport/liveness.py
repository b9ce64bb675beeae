"""Whether a certain process of this machine is still there; a process id alone may have been given to another since."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process by id and start time (seconds since the epoch, as this process sees it)."""

    pid: int
    start_time: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process that has this id now; None where there is none. Raises OSError where that cannot be seen."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None

    def alive(self) -> bool:
        """False once it has ended: nothing of it runs any more, even if its parent has not taken notice yet (zombie)."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.start_time and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except OSError:  # no file left to look with (strangers may have all connections for a moment): asked again soon
            return True
