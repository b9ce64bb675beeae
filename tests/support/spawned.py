"""What tests run in processes that are started anew, and so must be imported by name."""

from __future__ import annotations

import os
import signal

from splitserve.coordinator.processes import Place
from splitserve.coordinator.settings import CoordinatorSettings


def signalled_at_once(settings: CoordinatorSettings, place: Place) -> None:
    """A coordinator process that gets SIGUSR2 before it has set its log up."""
    os.kill(os.getpid(), signal.SIGUSR2)
