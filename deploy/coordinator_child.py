"""One of several coordinator processes, from its first line."""

from __future__ import annotations

import logging
import sys

from ..coordinator.processes import CANNOT_START, CannotStart, Place
from ..coordinator.settings import CoordinatorSettings
from ..coordinator.tenants.errors import TenantsError
from ..engine.errors import EngineError
from ..transport.errors import TransportError
from .process_log import log_to_stderr

_log = logging.getLogger(__name__)


def run(settings: CoordinatorSettings, place: Place) -> None:
    """Sets up what a process of its own needs, and serves."""
    from ..coordinator.main import run_one

    log_to_stderr(settings.log_level, settings.log_format, f"coordinator-{place.number}")
    try:
        run_one(settings, place)
    except (CannotStart, EngineError, TenantsError, TransportError, OSError) as error:
        _log.error("cannot start: %s", error)
        sys.exit(CANNOT_START)
