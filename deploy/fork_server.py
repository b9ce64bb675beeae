"""Imported by the fork server alone, before anything else: it is killed when the thread that made it ends.
(By itself it would live as long as its workers do.)"""

from __future__ import annotations

import ctypes
import gc
import os
import signal

PR_SET_PDEATHSIG = 1
PID = os.getpid()

libc = ctypes.CDLL(None)
libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
gc.disable()  # among what is imported now there is no garbage; to look for some takes a tenth of the time
