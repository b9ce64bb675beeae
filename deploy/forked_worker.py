"""What a forked worker does first."""

from __future__ import annotations

import ctypes
import gc
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from .early_signals import ENDING

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
ADOPTED_EVERY_S = 1e-4


def be_worker(
    supervisor: int,
    first: Callable[[], None] | None,
    entry: str,
    name: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    output: Connection,
    born: Connection,
) -> None:
    """Become a child of ``supervisor``, call ``first``, then ``entry`` with these arguments, environment and
    output.

    ``entry``: the function that ``splitserve ARGUMENTS`` runs, as MODULE:NAME. Sends (process id, fork
    server's process id) through ``born`` once this process is the supervisor's child. Ends with SystemExit.
    """
    from . import fork_server

    gc.freeze()  # the fork server's objects: to scan them would copy their pages
    gc.enable()
    _move_to(supervisor, fork_server.libc.prctl)
    os.setsid()  # Ctrl-C reaches the supervisor alone, which stops its children in good order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # held back in the server
    born.send((os.getpid(), fork_server.PID))
    born.close()
    fork_server.libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if first is not None:
        first()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["splitserve", *arguments]
    _show_in_ps(" ".join(sys.argv))
    pkgutil.resolve_name(entry)()


def _show_in_ps(title: str) -> None:
    """Write ``title`` over this process's command line, which is the fork server's."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = map(int, fields[45:47])  # arg_start and arg_end of proc(5)
    # where the last byte is not 0, the kernel shows the text before the first 0
    shown = os.fsencode(title)[: end - start - 2].ljust(end - start - 1, b"\0") + b"."
    ctypes.memmove(start, shown, end - start)


def _move_to(supervisor: int, prctl: Callable[..., int]) -> None:
    """Forks once more and lets the first process end: the kernel makes the second a child of the supervisor,
    which is a subreaper. The fork server's death is nothing to it then, the supervisor's is its own."""
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(ADOPTED_EVERY_S)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the line above
        os._exit(1)
