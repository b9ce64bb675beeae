"""The local supervisor: starts processes, waits until they serve, restarts what crashes, stops all.

One loop a process: run, wait for its end, ask the restart policy, run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from .child_process import ChildProcess, Command, Log, reap_adopted
from .restart import HungWatch, RestartPolicy

POLL_S = 0.1
WATCH_S = 1.0


class Supervisor:
    """Keeps processes running until ``stop``. Use as ``await supervisor.run(work)``."""

    def __init__(
        self,
        commands: Sequence[Command],
        *,
        is_ready: Callable[[], Awaitable[bool]],
        known_workers: Callable[[], Awaitable[dict[str, int] | None]],
        log: Log,
        grace_s: float = 10.0,
        ready_timeout_s: float = 600.0,
        policy: Callable[[], RestartPolicy] = RestartPolicy,
        leave_within_s: float = 20.0,
        hung_after_s: float = 15.0,
    ) -> None:
        """``known_workers``: process ids of the workers that the coordinator counts as alive; None where it
        does not answer. ``leave_within_s``: longest time in which a worker leaves in a rolling restart;
        ``hung_after_s``: longest time that a worker runs after the coordinator has given it up."""
        self.children = [ChildProcess(command, log) for command in commands]
        self.failure = ""
        self.failed: ChildProcess | None = None
        self._is_ready = is_ready
        self._log = log
        self._grace_s = grace_s
        self._ready_timeout_s = ready_timeout_s
        self._policy = policy
        self._known_workers = known_workers
        self._leave_within_s = leave_within_s
        self._hung_after_s = hung_after_s
        self._rolling: asyncio.Task[None] | None = None
        self._leaving = ""  # the process that a rolling restart has just stopped
        self._ever_ready = False
        self._stopping = asyncio.Event()
        self.stops = 0

    def stop(self) -> None:
        """Ends ``run``; called again, ends open streams; the third time, kills what still runs."""
        self._stopping.set()
        self.stops += 1  # two SIGTERM at once would be one: SIGINT is the second
        if self.stops > 1:
            self.signal_all(signal.SIGINT if self.stops == 2 else signal.SIGKILL)

    def roll(self) -> None:
        """Begins a rolling restart: each worker in turn leaves in good order and starts again; the next one
        when it is back."""
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.create_task(self._roll())

    async def run(self, work: Callable[[], Awaitable[int]]) -> int:
        """Starts all, waits until they are ready, then runs ``work`` until it returns or ``stop`` is called.

        Return the status of ``work``, 0 if stopped before, 1 if something could not start: then ``failure``
        names it.
        """
        keepers = [asyncio.create_task(self._keep(child)) for child in self.children]
        foreground = asyncio.create_task(self._serve(work))
        stopping = asyncio.create_task(self._stopping.wait())
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({foreground, stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            if foreground.done():
                return foreground.result()
            return 1 if self.failure else 0
        finally:
            self._stopping.set()
            watching.cancel()
            if self._rolling is not None:
                self._rolling.cancel()
            foreground.cancel()
            # its result, if any, was taken above
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await foreground
            await self._stop_all(keepers)

    async def _serve(self, work: Callable[[], Awaitable[int]]) -> int:
        deadline = time.monotonic() + self._ready_timeout_s
        while not await self._is_ready():
            if time.monotonic() > deadline:
                self.failure = (
                    f"not ready after {self._ready_timeout_s:g} s; the lines above say how far each "
                    "process came"
                )
                return 1
            await asyncio.sleep(POLL_S)
        self._ever_ready = True
        return await work()

    async def _watch(self) -> None:
        """Kills workers that hang, so that they are started again; reaps what dead processes have left to
        this one."""
        watch = HungWatch(self._hung_after_s)
        while True:
            await asyncio.sleep(WATCH_S)
            reap_adopted()
            known = await self._known_workers()
            if known is None:
                watch = HungWatch(self._hung_after_s)  # it is not known which workers live
                continue
            running = {
                child.command.name: child.pid
                for child in self.children
                if child.running and child.pid is not None
            }
            hung = watch.hung(known, running, time.monotonic())
            for child in self.children:
                if child.command.name in hung:
                    self._warn(child, "hangs: the coordinator has given it up, killing it")
                    child.signal(signal.SIGKILL)

    async def _roll(self) -> None:
        known = await self._answer()
        if known is None:
            name = self.children[0].command.name
            self._log(
                name,
                (
                    f"rolling restart: no answer for {self._leave_within_s:g} s, nothing was "
                    "restarted; ask again when there is one"
                ),
            )
            return
        for child in [child for child in self.children if child.command.name in known]:
            name, old = child.command.name, child.pid
            self._log(name, "rolling restart: is to leave")
            self._leaving = name
            child.signal(signal.SIGTERM)
            if not await _until(partial(child.runs_anew, old), self._leave_within_s):
                self._log(name, f"did not leave within {self._leave_within_s:g} s, killing it")
                child.signal(signal.SIGKILL)
            if not await self._is_back(child, old):
                self._log(name, "rolling restart: it is not back; the others stay as they are")
                return
        self._log(self.children[0].command.name, "rolling restart: every worker is new")

    async def _answer(self) -> dict[str, int] | None:
        """Return the workers that are known; None where the coordinator does not answer for
        ``leave_within_s``."""
        deadline = time.monotonic() + self._leave_within_s
        while (known := await self._known_workers()) is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return known

    async def _is_back(self, child: ChildProcess, old: int | None) -> bool:
        """Waits until the coordinator knows the new process."""
        deadline = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline:
            known = await self._known_workers() or {}
            if child.pid != old and known.get(child.command.name) == child.pid:
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def _keep(self, child: ChildProcess) -> None:
        """Run one process again and again, until ``stop`` or until it cannot start."""
        policy, name = self._policy(), child.command.name
        again = replace(child.command, argv=[*child.command.argv, *child.command.argv_again])
        while not self._stopping.is_set():
            policy.started(time.monotonic())
            status = await child.run()
            if self._stopping.is_set():
                return
            if self._leaving == name:
                self._leaving = ""
                continue
            delay = policy.delay_after_exit(time.monotonic(), ever_ready=self._ever_ready)
            if delay is None:
                last_line = next(
                    (line for line in reversed(child.last_lines) if line.strip()), "it printed nothing"
                )
                self.failed = child
                self.failure = (
                    f"{name} could not start ({_ending(status)}): {last_line.removeprefix('splitserve: ')}"
                )
                self._stopping.set()
                return
            self._warn(child, f"ended ({_ending(status)}); starts again in {delay:g} s")
            child.command = again
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()

    async def _stop_all(self, keepers: list[asyncio.Task[None]]) -> None:
        self.signal_all(signal.SIGTERM)
        self.signal_all(signal.SIGCONT)  # a stopped process receives SIGTERM only when it goes on
        _, late = await asyncio.wait(keepers, timeout=self._grace_s)
        if late:
            self.signal_all(signal.SIGKILL)
            await asyncio.wait(late)
        for keeper in keepers:
            keeper.result()

    def _warn(self, child: ChildProcess, text: str) -> None:
        """A line of the supervisor's own, in the form of the processes' lines."""
        self._log(child.command.name, f"{time.strftime('%H:%M:%S')} WARNING {text}")

    def signal_all(self, number: int) -> None:
        for child in self.children:
            child.signal(number)


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
