"""Parts of gpu_check that do next to nothing, or go wrong: run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from splitserve.bench.gpu_check.line import Line, Place


def fine(place: Place, *arguments: str) -> Iterator[Line]:
    yield Line("a figure", value=0.9, unit="share", at_least=0.8)
    yield Line("a check", good=True)


def wrong(place: Place) -> Iterator[Line]:
    yield Line("a check that fails", good=False, value=0.5, unit="error")


def abort(place: Place, *arguments: str) -> Iterator[Line]:
    yield Line("before the abort", good=True)
    os.abort()


def fail(place: Place, *arguments: str) -> Iterator[Line]:
    yield Line("before the exception", good=True)
    raise RuntimeError("an illegal memory access was encountered")


def hang(place: Place, *arguments: str) -> Iterator[Line]:
    yield Line("before the hang", good=True)
    time.sleep(600)


def leave_behind(place: Place) -> Iterator[Line]:
    """A process that is no child of anybody's and would outlive this one."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (Path(place.work) / "left_behind").write_text(str(child.pid))
    yield Line("a process was started", good=True)
    os._exit(3)
