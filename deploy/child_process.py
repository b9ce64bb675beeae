"""One process that the supervisor runs: started so that it cannot outlive us, its output read line by line."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded before any fork: nothing may be loaded between fork and exec

Log = Callable[[str, str], None]
"""Takes a process's name and a line of its output."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, under which name."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class ChildProcess:
    """A running command. It is killed by the kernel when this process dies."""

    def __init__(self, command: Command, log: Log) -> None:
        self.command = command
        self.last_lines: deque[str] = deque(maxlen=20)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def run(self) -> int:
        """Starts the process, logs its output, returns its exit status (-N: killed by signal N)."""
        self._process = await asyncio.create_subprocess_exec(
            *self.command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self.command.env),
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which stops its children in good order
            preexec_fn=_die_with(os.getpid()),
        )
        reader = asyncio.create_task(self._read(self._process))
        status = await self._process.wait()
        # A grandchild may hold the pipe open: what the process itself said has arrived by now.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader, 1)
        return status

    def signal(self, number: int) -> None:
        """Sends a signal if the process runs."""
        if self._process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            self._say(lines)
        self._say([rest] if rest else [])

    def _say(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            self._log(self.command.name, text)


def _die_with(parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return before_exec
