"""Background tasks are watched: one that fails ends its process, with its traceback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

_log = logging.getLogger(__name__)


async def until_stopped(stopping: asyncio.Event, tasks: Iterable[asyncio.Task[Any]]) -> bool:
    """Waits for the event, or for the failure of a task, which is logged. Returns whether none has failed; a task may end before."""
    stopped = asyncio.create_task(stopping.wait())
    pending: set[asyncio.Task[Any]] = {stopped, *tasks}
    while not stopped.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                stopped.cancel()
                _log.critical("a background task (%s) has failed, this process ends", task.get_coro(), exc_info=error)
                return False
    return True
