"""One of several coordinator processes, from its first line."""

from __future__ import annotations

from ..coordinator.processes import Place
from ..coordinator.settings import CoordinatorSettings
from .process_log import log_to_stderr


def run(settings: CoordinatorSettings, place: Place) -> None:
    """Sets up what a process of its own needs, and serves."""
    from ..coordinator.main import run_one

    log_to_stderr(settings.log_level, settings.log_format, f"coordinator-{place.number}")
    run_one(settings, place)
