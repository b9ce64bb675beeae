"""`splitserve up` in a process that has imported everything: it forks its first fork server, its coordinator
comes from there, as the workers do, and a coordinator forks its first processes.

What replaces a fork server or a coordinator process that has died is a new interpreter, as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver, process, util
from typing import Any, NoReturn

from splitserve.deploy.early_signals import ENDING

_start_anew = util.spawnv_passfds


def fork_what_it_starts() -> None:
    """From now on."""
    from splitserve.cli import local_cluster
    from splitserve.coordinator.processes import CoordinatorProcess
    from splitserve.deploy.worker_forks import WorkerForks

    make, commands = WorkerForks.__init__, local_cluster.commands
    keep_running = CoordinatorProcess.keep_running

    def made(self: WorkerForks, *args: Any) -> None:
        make(self, *args)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        _forking(forkserver.ensure_running)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def forked(plan: Any, fork: Any = None) -> list[Any]:
        coordinator, *workers = commands(plan, fork)
        assert coordinator.argv[3] == "coordinator"  # python -m splitserve.cli.main coordinator
        start = partial(fork, first=_be_no_daemon)
        return [replace(coordinator, argv=coordinator.argv[3:], start=start), *workers]

    def kept(self: CoordinatorProcess, now: float) -> None:
        if self._num_starts:
            keep_running(self, now)
        else:
            _forking(keep_running, self, now)

    WorkerForks.__init__, local_cluster.commands = made, forked  # type: ignore[method-assign]
    CoordinatorProcess.keep_running = kept  # type: ignore[method-assign]


def _be_no_daemon() -> None:
    """Multiprocessing's daemons may have no children, which a coordinator has."""
    process.current_process()._config["daemon"] = False


def _forking(start: Any, *args: Any) -> None:
    """Call ``start``, in a process of one thread: multiprocessing forks it instead of starting a new
    interpreter."""
    util.spawnv_passfds = _fork
    try:
        start(*args)
    finally:
        util.spawnv_passfds = _start_anew


def _fork(path: bytes, args: Sequence[str], passed: Sequence[int]) -> int:
    code, *argv = args[args.index("-c") + 1 :]
    if "multiprocessing.resource_tracker" in code:  # which imports next to nothing
        return _start_anew(path, args, passed)
    pid = os.fork()
    if pid == 0:
        _forget_the_parent({0, 1, 2, *passed})
        sys.argv = ["-c", *argv]
        end_after(lambda: exec(code, {}))  # as the new interpreter would
    return pid


def _forget_the_parent(kept: set[int]) -> None:
    """Close its files except ``kept``; drop its handlers of signals and what it does at its end."""
    util.spawnv_passfds, tempfile.tempdir = _start_anew, None
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # the one that listed them is closed
            os.close(fd)


def end_after(run: Any) -> NoReturn:
    """Call ``run``, then end this process with what an interpreter does at its end; memory is not freed."""
    status: Any = 1
    try:
        run()
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status or 0)
