"""Worker processes forked from one that has imported torch and our own modules already: they start, also in a
dead one's place, without the seconds of imports. The forking process itself does nothing else, so it has one
thread and no GPU context; its memory is the workers' too.

Built on ``multiprocessing``'s fork server. Workers are children of this process, not of the fork server (see
``forked_worker.py``): they go on when it ends, another one takes its place, and they die with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, resource_tracker
from types import ModuleType

from .child_process import Command
from .early_signals import ENDING
from .forked_worker import be_worker

FORK_SERVER, WORKER = "splitserve.deploy.fork_server", "splitserve.worker.main"
"""Imported once, before any fork, together with the entry's module."""
PR_SET_CHILD_SUBREAPER = 36
PAUSES_S = (0.02, 0.1, 0.5, 2.0)
"""After each failed start: a process that has been killed lives for a moment more."""
_libc = ctypes.CDLL(None)


class WorkerForks:
    """Starts workers; ``start`` is a ``child_process.Start``. Makes this process the subreaper of its
    descendants until ``close``."""

    def __init__(self, entry: str, notify: Callable[[str], None] = lambda text: None) -> None:
        """``entry``: the function that ``splitserve`` runs, as MODULE:NAME; ``notify`` takes a sentence
        when the fork server has ended."""
        self._notify, self._entry = notify, entry
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([FORK_SERVER, entry.partition(":")[0], WORKER])
        # the server's: one with threads must not fork
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # the first start waits for the imports, and Process is for one thread
        self._thread = ThreadPoolExecutor(1, "worker forks", _hold_endings)
        self._server: int | None = None  # its process id
        self._server_fd = -1
        self._is_renewed = False  # the server ends because it is to
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    async def start(
        self, command: Command, output: int, first: Callable[[], None] | None = None
    ) -> ForkedWorker:
        """Forks a worker that calls ``first``, then runs ``splitserve`` with the arguments in
        ``command.argv``. Raises OSError."""
        pid, server = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._start, command, output, first
        )
        self._watch(server)
        return ForkedWorker(pid)

    def renew(self) -> None:
        """Have later workers run the build that is installed by now."""
        if self._server is not None:
            self._is_renewed = True
            signal.pidfd_send_signal(self._server_fd, signal.SIGKILL)

    def close(self) -> None:
        """After the last worker has ended."""
        self._unwatch()
        self._thread.shutdown()
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _start(self, command: Command, output: int, first: Callable[[], None] | None) -> tuple[int, int]:
        """Process ids of the worker and of its fork server. A server that ends meanwhile is started again."""
        for pause_s in PAUSES_S:
            with contextlib.suppress(EOFError, ConnectionError):
                return self._fork(command, output, first)
            time.sleep(pause_s)
        raise OSError(f"the fork server ended {len(PAUSES_S)} times while it started {command.name}")

    def _fork(self, command: Command, output: int, first: Callable[[], None] | None) -> tuple[int, int]:
        (receiver, sender), (born, born_end) = (self._context.Pipe(duplex=False) for _ in range(2))
        with receiver, born:
            with sender, born_end:
                # a Connection, for that is what is handed to a fork
                os.dup2(output, sender.fileno(), inheritable=False)
                theirs = (command.name, tuple(command.argv), dict(command.env), sender, born_end)
                arguments = (os.getpid(), first, self._entry, *theirs)
                between = self._context.Process(target=be_worker, args=arguments, daemon=True)
                with _without_main():
                    between.start()
            pid, server = born.recv()
            between.join()
            return pid, server

    def _watch(self, server: int) -> None:
        if server == self._server:
            return
        self._unwatch()
        with contextlib.suppress(ProcessLookupError):  # it has ended: the next start makes another one
            self._server_fd, self._server = os.pidfd_open(server), server
            asyncio.get_running_loop().add_reader(self._server_fd, self._server_ended)

    def _unwatch(self) -> None:
        if self._server is not None:
            with contextlib.suppress(RuntimeError):  # the loop is over
                asyncio.get_running_loop().remove_reader(self._server_fd)
            os.close(self._server_fd)
            self._server, self._is_renewed = None, False

    def _server_ended(self) -> None:
        if not self._is_renewed:
            self._notify(
                f"the fork server (process {self._server}) has ended; workers go on, and another one "
                "is started for later ones"
            )
        self._unwatch()
        self._thread.submit(forkserver.ensure_running)


def _hold_endings() -> None:
    """A signal to the whole process group, as Ctrl-C is, does not end the server: it inherits this thread's
    mask, and is killed when the thread ends."""
    resource_tracker.ensure_running()  # the server needs it; to start it clears the mask
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


@contextmanager
def _without_main() -> Iterator[None]:
    """Children would run the program's main module once more, which none of them needs."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class ForkedWorker:
    """A running one (``child_process.Started``), a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def wait(self) -> int:
        """Its exit status; -N where signal N ended it."""
        loop, ended, fd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(self.pid)
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError where it has ended."""
        os.kill(self.pid, signal.Signals(number))
