"""The command ``splitserve`` from its first line (the commands are in cli.py)."""

from __future__ import annotations

import os

from ..deploy.early_signals import hold_signals


def main() -> None:
    """Takes some tenths of a second to import what a command needs; signals wait for it."""
    hold_signals()
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # torch's threads would spin on cores that others need
    from .main import main as run

    run()


if __name__ == "__main__":
    main()
