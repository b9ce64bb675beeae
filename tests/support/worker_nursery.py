"""Forks processes of ``splitserve`` for tests: all modules are imported once, so that a process is there, or
back, in a fraction of a second.

    python -m support.worker_nursery

reads JSON lines: {"argv", "log", "env"} is answered with the new process's id, {"ended": id} with its exit
status. Processes die with the nursery, which ends with its standard input.

A worker from here is `splitserve prefill` or `splitserve decode`, with two differences: a request with a seed
of ``KILLS`` kills the worker of that role that computes it; one with a seed of ``HANGS`` keeps the first such
worker's model busy until the coordinator has given the worker up (then somebody kills it), while its loop
answers as ever. `splitserve up` and its coordinator: see ``forked_up.py``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from support.forked_up import end_after, fork_what_it_starts

PR_SET_PDEATHSIG = 1
HANGS = {"prefill": 66_611, "decode": 66_612}
LOOK_S = 0.05
FENCED = b"cut off by the coordinator"
KILLS = {"prefill": 66_601, "decode": 66_602}


def main() -> None:
    import splitserve.cli.coordinator
    import splitserve.cli.local_cluster
    import splitserve.cli.up
    import splitserve.worker.main  # noqa: F401

    gc.freeze()  # as in a worker of the fork server
    libc = ctypes.CDLL(None)
    for line in sys.stdin:
        order = json.loads(line)
        if "ended" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["ended"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            be_process(order)
        print(pid, flush=True)


def be_process(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, log + 1)
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # it depends on the environment
    sys.modules["__main__"] = ModuleType("__main__")  # what this one starts would import the nursery again
    role = order["argv"][0]
    sys.argv = ["splitserve", *order["argv"]]
    if role in KILLS:
        catch(KILLS[role], HANGS[role], Path(order["log"]))
    else:
        fork_what_it_starts()
    from splitserve.cli.main import main as splitserve

    end_after(splitserve)


def catch(kills: int, hangs: int, log: Path) -> None:
    """From now on a batch with a sequence of such a seed is this process's last."""
    from splitserve.engine.step.batch import Batch
    from splitserve.engine.step.model_runner import ModelRunner

    execute, hung = ModelRunner.execute, log.with_name(f"{log.name.partition('-')[0]} has hung")

    def deadly(self: ModelRunner, batch: Batch, *args: Any) -> Any:
        seeds = {state.params.seed for state in batch.sampling if state is not None}
        if hangs in seeds and not hung.exists():
            hung.touch()
            message = log.stat().st_size
            while FENCED not in log.read_bytes()[message:]:
                time.sleep(LOOK_S)
            os.kill(os.getpid(), signal.SIGKILL)
        if kills in seeds:
            os.kill(os.getpid(), signal.SIGKILL)
        return execute(self, batch, *args)

    ModelRunner.execute = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
