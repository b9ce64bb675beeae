"""The command ``splitserve`` from its first line (the commands are in main.py)."""

from __future__ import annotations

import io
import os
import sys

from ..deploy.early_signals import hold_signals


def main() -> None:
    """Takes some tenths of a second to import what a command needs; signals wait for it."""
    hold_signals()
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  it is None where it was closed
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # input that is not UTF-8, a terminal that has not all of it
    from .main import main as run

    run()


if __name__ == "__main__":
    main()
