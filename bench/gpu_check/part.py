"""The process of one part: runs it and writes a line of JSON for each of its Lines.

python -m splitserve.bench.gpu_check.part MODULE:FUNCTION LINES_FILE WORK_FOLDER DEVICE UNTIL [ARGUMENT]

UNTIL: when it is killed, by the monotonic clock, which the processes of a host share.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from .line import Place, as_json

DUMP_BEFORE_S = 2.0  # its end: every thread's stack goes to the log


def main(target: str, lines: Path, work: Path, device: str, until: float, arguments: list[str]) -> None:
    faulthandler.enable()
    started = time.monotonic()
    left_s = until - started
    faulthandler.dump_traceback_later(max(left_s - DUMP_BEFORE_S, left_s / 2, 0.1))
    module, _, function = target.partition(":")
    with lines.open("a", encoding="utf-8") as file:
        place = Place(device, device != "cpu", work)
        for found in getattr(import_module(module), function)(place, *arguments):
            line = found if place.big else replace(found, at_least=None, at_most=None, headline=False)
            print(f"{time.monotonic() - started:6.1f} {line}", flush=True)
            print(json.dumps(as_json([line])[0]), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], float(sys.argv[5]), sys.argv[6:])
