"""The background work of a process: what fails there ends the process, with its traceback in the log."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from ..transport.errors import TransportError

Work = Coroutine[Any, Any, None]
Spawn = Callable[[str, Work], asyncio.Task[None]]
"""Start a named background task."""
_log = logging.getLogger(__name__)


def unwatched(name: str, work: Work) -> asyncio.Task[None]:
    """Start a task outside of any group: for a component that runs by itself, as in tests."""
    return asyncio.get_running_loop().create_task(work, name=name)


async def follow(what: str, refresh: Callable[[], str], every_s: float = 1.0) -> None:
    """Call ``refresh`` for ever: it goes by a file where that has changed, and then returns how. Where the
    file is no good it raises; what was in force stays so."""
    reported = ""
    while True:
        await asyncio.sleep(every_s)
        try:
            if changed := refresh():
                _log.info("the %s has changed: %s", what, changed)
            reported = ""
        except (OSError, ValueError, TransportError) as error:
            if reported != (reported := str(error)):
                _log.error("still going by the old %s: %s", what, error)


@asynccontextmanager
async def background() -> AsyncIterator[Spawn]:
    """Run tasks until the block ends, then cancel them.

    A task or a thread that fails is logged and cancels the block; once that has been left, an ExceptionGroup
    is raised. An exception of the block itself passes unchanged.
    """
    running: list[asyncio.Task[None]] = []
    failed: Exception | None = None
    with _thread_failures() as thread_failure:
        async with asyncio.TaskGroup() as group:

            def spawn(name: str, work: Work) -> asyncio.Task[None]:
                task = group.create_task(work, name=name)
                task.add_done_callback(_log_failure)
                running.append(task)
                return task

            spawn("threads", _raised(thread_failure))
            try:
                yield spawn
            except Exception as error:
                failed = error
            for task in running:
                task.cancel()
    if failed is not None:
        raise failed


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("background work has failed (%s), this process ends", task.get_name(), exc_info=error)


@contextmanager
def _thread_failures() -> Iterator[asyncio.Future[None]]:
    """Yield a future that fails when any thread does. Without it Python prints the error and goes on without
    the thread."""
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()

    def set_failed(error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    def hook(args: threading.ExceptHookArgs) -> None:
        error = RuntimeError(f"the thread {args.thread.name if args.thread is not None else '?'} has failed")
        error.__cause__ = args.exc_value
        loop.call_soon_threadsafe(set_failed, error)

    previous, threading.excepthook = threading.excepthook, hook
    try:
        yield failed
    finally:
        threading.excepthook = previous
        failed.cancel()


async def _raised(failed: asyncio.Future[None]) -> None:
    await failed
