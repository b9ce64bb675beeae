"""Errors of launching: a cluster manager refuses, or is not there."""

from __future__ import annotations


class LaunchError(Exception):
    """A cluster manager cannot start or stop a process. The message has the reason and a remedy."""
