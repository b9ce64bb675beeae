"""Record which functions a process calls; Python imports this file at its start when the folder is on
PYTHONPATH.

``tools/house.py --request`` is the only program that puts it there. The first byte of the file TRACE_PHASE
selects the phase: ``0`` records nothing. Each first call within a phase appends one line to
TRACE_FOLDER/<process id>.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from types import CodeType, FrameType

ROOT = os.environ["TRACE_ROOT"]
FOLDER = os.environ["TRACE_FOLDER"]
OFF = ord("0")

_seen: set[tuple[int, CodeType]] = set()
_names: dict[
    str, str | None
] = {}  # path as the interpreter gives it -> path below ROOT, None if it is not ours
with open(os.environ["TRACE_PHASE"], "rb") as _file:
    _phase = mmap.mmap(_file.fileno(), 1, access=mmap.ACCESS_READ)


def _record(frame: FrameType, event: str, argument: object) -> None:
    phase = _phase[0]
    if phase == OFF or event != "call":
        return
    code = frame.f_code
    if (phase, code) in _seen:
        return
    _seen.add((phase, code))
    if (name := _name(code.co_filename)) is not None:
        line = f"{chr(phase)}\t{name}\t{code.co_firstlineno}\t{code.co_qualname}\n"
        with open(f"{FOLDER}/{os.getpid()}", "a", encoding="utf-8") as file:
            file.write(line)


def _name(path: str) -> str | None:
    if path not in _names:
        real = os.path.realpath(path)
        ours = real.startswith(ROOT + os.sep) and real.endswith(".py") and "site-packages" not in real
        _names[path] = os.path.relpath(real, ROOT) if ours else None
    return _names[path]


os.register_at_fork(after_in_child=_seen.clear)
threading.setprofile(_record)
sys.setprofile(_record)
