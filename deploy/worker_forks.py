"""Worker processes forked from one that has imported torch and our own modules already: they start, also in a dead one's place, without the
seconds of imports. The forking process itself does nothing else, so it has one thread and no GPU context; its memory is the workers' too.

Built on ``multiprocessing``'s fork server. Workers die with it, and it with the process that made it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from types import ModuleType

from .child_process import Command
from .forked_worker import FORK_SERVER_MODULES, be_worker


class WorkerForks:
    """Starts workers; ``start`` is a ``child_process.Start``."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(FORK_SERVER_MODULES))
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # the server's: one with threads must not fork
        self._thread = ThreadPoolExecutor(1, "worker forks")  # the first start waits for the imports, and Process is for one thread

    async def start(self, command: Command, output: int, first: Callable[[], None] | None = None) -> ForkedWorker:
        """Forks a worker that calls ``first``, then runs ``splitserve`` with the arguments in ``command.argv``."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._start, command, output, first)

    def close(self) -> None:
        """After the last worker has ended."""
        self._thread.shutdown()

    def _start(self, command: Command, output: int, first: Callable[[], None] | None) -> ForkedWorker:
        receiver, sender = self._context.Pipe(duplex=False)
        with receiver, sender:
            os.dup2(output, sender.fileno(), inheritable=False)  # a Connection, for that is what is handed to a fork
            process = self._context.Process(
                target=be_worker, args=(first, command.name, tuple(command.argv), dict(command.env), sender), daemon=True
            )
            with _without_main():
                process.start()
        return ForkedWorker(process, self._thread)


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
    """A running one (``child_process.Started``)."""

    def __init__(self, process: ForkServerProcess, thread: ThreadPoolExecutor) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process, self._thread = process, thread

    async def wait(self) -> int:
        """Its exit status; -N where signal N ended it, 255 where its fork server died."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        return await loop.run_in_executor(self._thread, self._status)

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError where it has ended."""
        os.kill(self.pid, signal.Signals(number))

    def _status(self) -> int:
        self._process.join()
        status = self._process.exitcode
        assert status is not None
        return status
