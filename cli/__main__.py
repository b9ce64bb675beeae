"""The command ``splitserve`` from its first line (the commands are in main.py)."""

from __future__ import annotations

import io
import os
import signal
import sys

from ..deploy.early_signals import hold_signals


def main() -> None:
    """Takes some tenths of a second to import what a command needs; SIGUSR1 and SIGUSR2 wait for it, and
    Ctrl-C ends it without a traceback."""
    hold_signals()
    before = signal.getsignal(signal.SIGINT)
    if callable(before):  # else it is to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  it is None where it was closed
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # input that is not UTF-8, a terminal that has not all of it
    from .main import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
