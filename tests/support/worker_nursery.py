"""Forks worker processes for tests: torch is imported once, so that a worker that was killed is back in a
fraction of a second.

    python -m support.worker_nursery

reads {"role", "argv", "log"} as JSON lines and answers each with the new worker's process id.

A worker from here is `splitserve prefill` or `splitserve decode`, with two differences: a request with a seed
of ``KILLS`` kills the worker of that role that computes it; one with a seed of ``HANGS`` keeps the first such
worker's model busy until the coordinator has given the worker up (then somebody kills it), while its loop
answers as ever. Workers die with the nursery, which ends with its standard input.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
HANGS = {"prefill": 66_611, "decode": 66_612}
LOOK_S = 0.05
FENCED = b"cut off by the coordinator"
KILLS = {"prefill": 66_601, "decode": 66_602}


def main() -> None:
    import splitserve.worker.main  # noqa: F401

    gc.freeze()  # as in a worker of the fork server
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            be_worker(order)
        print(pid, flush=True)


def be_worker(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        catch(KILLS[order["role"]], HANGS[order["role"]], Path(order["log"]))
        sys.argv = ["splitserve", order["role"], *order["argv"]]
        from splitserve.cli.main import main as splitserve

        splitserve()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


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
