"""Triton's kernels run in its interpreter here (it reads this when it is imported);
``bench/gpu_check`` runs them on a GPU."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for what runs in their background
    signal.signal(signal.SIGINT, signal.default_int_handler)
# How long examples take, to run and to draw, depends on the machine's load; each test has its time limit. The
# same ones each time: whether
# a commit passes is no matter of luck. (To search for more: --hypothesis-profile search.)
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")
# It also draws constants that it finds in the modules imported so far: which these are depends on the tests
# that ran before in the same process.
vars(providers)["_get_local_constants"] = Constants


@contextmanager
def _compiled_once() -> Iterator[None]:
    """The first of several test processes imports alone, and leaves compiled files to the others: each
    compiles all of a new clone otherwise, which takes as long as the imports."""
    with open(__file__) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without looking for garbage, and never look at what stays: a third of the time."""
    gc.disable()
    try:
        with _compiled_once() if "PYTEST_XDIST_WORKER" in os.environ else nullcontext():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Callable[[str, str, str], None]:
    """Record family, column and weight format for the table of tried formats. See ``tools/tried.py``."""
    return lambda family, column, what: record_property("tried", f"{family}|{column}|{what}")


HANGS_AFTER_S = 700.0
"""After which a test ends its process, with a dump of all threads: more than any time limit. pytest-timeout
ends neither what hangs in native code nor the teardown of a test that has failed."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(HANGS_AFTER_S, file=stderr, exit=True)


def pytest_runtest_logstart(location: tuple[str, int | None, str]) -> None:
    """Lower the priority of a test process that has others beside it, unless it runs the tests of real
    processes: a process of theirs that must wait for a core looks dead."""
    if "PYTEST_XDIST_WORKER" in os.environ and "/e2e/" not in location[0] and os.nice(0) == 0:
        os.nice(3)


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


LONGEST_FIRST = (
    "e2e", "kernels", "simulation", "planner", "engine", "coordinator", "bench", "deploy", "transport",
    "worker",
)  # fmt: skip
"""Folders: what takes longest comes first, so that all test processes end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: next(
            (rank for rank, name in enumerate(LONGEST_FIRST) if name in item.path.parts), len(LONGEST_FIRST)
        )
    )


WAITING = (
    "test_key_rotation.py", "test_kubernetes.py", "test_late_coordinator.py", "test_operator.py",
    "test_paced.py", "test_steering.py",
)  # fmt: skip
"""Files of ``e2e`` whose clusters are their own and wait more than they compute. One after the other, all of
``e2e`` took as long as everything else on the cores together."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How several test processes share the work (``deploy/test.sh``): the tests of real processes come in
    two turns, so that no more of these compete for the cores, the others file by file beside them.
    (pytest-xdist's own groups, ``--dist loadgroup``, are overlooked with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class InTurn(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return ("waits" if Path(file).name in WAITING else "e2e") if "/e2e/" in file else file

    return InTurn(config, log)
