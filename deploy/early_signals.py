"""SIGUSR1 and SIGUSR2 kill a process that has no handler for them yet: until it has, they are held back, and
come when it is there."""

from __future__ import annotations

import signal

EARLY = frozenset({signal.SIGUSR1, signal.SIGUSR2})
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Held back in the fork server for good: sent to a process group, they are for its leader."""


def hold_signals() -> None:
    """Also in programs that this process starts, until they call ``deliver_signals``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, EARLY)


def deliver_signals() -> None:
    """The handlers are there: what has come meanwhile comes now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EARLY)
