"""One process that the supervisor runs: started so that it cannot outlive us, its output read line by
line."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .early_signals import hold_signals

PR_SET_PDEATHSIG = 1
READ_BYTES = 1 << 16
LAST_WORDS_S = 1.0
NOT_STARTED = 255
"""Exit status of a process that could not even be started."""
_libc = ctypes.CDLL(None)  # loaded before any fork: nothing may be loaded between fork and exec

Log = Callable[[str, str], None]
"""Takes a process's name and a line of its output."""


class Started(Protocol):
    """A process that runs or has run."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Its exit status; -N where signal N ended it."""
        ...

    def send_signal(self, number: int) -> None: ...


Start = Callable[["Command", int], Awaitable[Started]]
"""Starts a command, with a descriptor for its output. The process is in a session of its own, and dies with
us."""


async def start_anew(command: Command, output: int) -> Started:
    """Runs ``command.argv`` as a new program."""
    return await asyncio.create_subprocess_exec(
        *command.argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(command.env),
        start_new_session=True,  # Ctrl-C reaches the supervisor alone, which stops its children in good order
        preexec_fn=die_with(os.getpid()),
    )


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, under which name, and how it is started."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    start: Start = start_anew
    argv_again: Sequence[str] = ()
    """Added where it is started again after the system has served."""


class ChildProcess:
    """A running command. It is killed by the kernel when this process dies."""

    def __init__(self, command: Command, log: Log) -> None:
        self.command = command
        self.last_lines: deque[str] = deque(maxlen=20)
        self._log = log
        self._process: Started | None = None
        self._starting: list[int] | None = None  # signals for a process that is just being started
        self.running = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def run(self) -> int:
        """Starts the process, logs its output, returns its exit status (-N: killed by signal N;
        NOT_STARTED)."""
        self._starting = []
        loop, (output, sink) = asyncio.get_running_loop(), os.pipe()
        stream = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(output, "rb")
        )
        try:
            process = await self._begin(sink)
        except OSError as error:  # no memory for it, or no process id
            self._log_lines([f"it cannot be started: {error}".encode()])
            transport.close()
            return NOT_STARTED
        finally:
            os.close(sink)
        reader = asyncio.create_task(self._read(stream))
        status = await process.wait()
        self.running = False
        # A grandchild may hold the pipe open: the process's own output is there by now. (wait_for, from
        # Python 3.12 on, would end the reader before it has read that, where this loop is late: a process
        # that cannot start would seem to have printed nothing.)
        try:
            await asyncio.wait({reader}, timeout=LAST_WORDS_S)
        finally:
            reader.cancel()
        await asyncio.wait({reader})
        if not reader.cancelled():
            reader.result()
        transport.close()
        return status

    def runs_anew(self, old: int | None) -> bool:
        """Return whether it runs in another process than ``old``."""
        return self.pid != old and self.running

    def signal(self, number: int) -> None:
        """Sends a signal if the process runs, or as soon as it does where it is being started."""
        if self._starting is not None:
            self._starting.append(number)
        elif self._process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _begin(self, sink: int) -> Started:
        try:
            self._process = process = await self.command.start(self.command, sink)
        finally:
            early, self._starting = self._starting, None
        self.running = True
        for number in early or []:
            self.signal(number)
        return process

    async def _read(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            self._log_lines(lines)
        self._log_lines([rest] if rest else [])

    def _log_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            self._log(self.command.name, text)


def reap_adopted() -> None:
    """Reaps ended grandchildren that have become this process's own because their parent died before them
    (see ``WorkerForks``).

    Children of this process lead a session each or belong to its own one: their starters wait for those.
    """
    with contextlib.suppress(ChildProcessError):  # there are no children at all
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if os.getsid(ended.si_pid) in (ended.si_pid, os.getsid(0)):
                return  # waited for elsewhere in a moment; those behind it are seen the next time
            os.waitpid(ended.si_pid, os.WNOHANG)


def die_with(parent: int) -> Callable[[], None]:
    """Return a ``preexec_fn``: the kernel kills the process when the thread that starts it ends."""

    def before_exec() -> None:
        hold_signals()
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return before_exec
