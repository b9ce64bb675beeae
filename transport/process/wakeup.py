"""Wakes a thread that waits in a poller, from any other thread."""

from __future__ import annotations

import contextlib
import ctypes
import os


class Wakeup:
    """A flag with a file descriptor: readable (``fd``, for zmq.Poller too) from ``set`` until ``clear``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """Thread-safe; setting it twice is setting it once."""
        ctypes.pythonapi.eventfd_write(self.fd, ctypes.c_uint64(1))  # os's would yield Python's lock

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # was not set
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)
