"""What a forked worker does first."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

FORK_SERVER_MODULES = ("splitserve.deploy.fork_server", "splitserve.deploy.cli", "splitserve.prefill.worker", "splitserve.decode.worker")
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def be_worker(
    first: Callable[[], None] | None, name: str, arguments: Sequence[str], environ: Mapping[str, str], output: Connection
) -> None:
    """Calls ``first``, then becomes ``splitserve ARGUMENTS`` with this environment and output. Ends with SystemExit."""
    from . import fork_server

    fork_server.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != fork_server.PID:  # it died before the line above
        os._exit(1)
    fork_server.libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if first is not None:
        first()
    os.setsid()  # Ctrl-C reaches the supervisor alone, which stops its children in good order
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["splitserve", *arguments]
    from .cli import main

    main()
