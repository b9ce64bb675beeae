"""Workers' processes on this host: their end is noticed at once, not by their silence."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from ..transport.messages.messages import Hello
from ..transport.process.host import host_identity
from .lifecycle.worker import WorkerId


class ProcessWatch:
    """``on_end`` is called on the event loop when a watched worker's process has ended, whatever ended it."""

    def __init__(self, on_end: Callable[[WorkerId], None]) -> None:
        self._on_end = on_end
        self._here = host_identity()
        self._fds: dict[WorkerId, int] = {}

    def watch(self, hello: Hello) -> None:
        """Watch a new worker's process, if it runs on this host and in this process namespace."""
        worker = (hello.worker_id, hello.incarnation)
        if hello.host != self._here or worker in self._fds:
            return
        try:
            fd = os.pidfd_open(hello.pid)
        except OSError:
            return  # ended already, or not supported: its silence will show its end
        self._fds[worker] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, worker)

    def forget(self, worker: WorkerId) -> None:
        """The worker is not known any more."""
        fd = self._fds.pop(worker, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for worker in list(self._fds):
            self.forget(worker)

    def _ended(self, worker: WorkerId) -> None:
        self.forget(worker)
        self._on_end(worker)
