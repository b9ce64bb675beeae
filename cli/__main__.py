"""The command ``splitserve`` from its first line (the commands are in main.py)."""

from __future__ import annotations

from ..deploy.early_signals import hold_signals


def main() -> None:
    """Takes some tenths of a second to import what a command needs; signals wait for it."""
    hold_signals()
    from .main import main as run

    run()


if __name__ == "__main__":
    main()
