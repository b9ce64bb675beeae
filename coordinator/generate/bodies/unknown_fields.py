"""Says in the log, now and then, which fields of requests this server does not know."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic

INTERVAL_S = 10.0
MAX_NAMES = 20
logger = logging.getLogger(__name__)


class UnknownFields:
    """At most one line every ``INTERVAL_S`` seconds."""

    def __init__(self) -> None:
        self._quiet_until = float("-inf")

    def note(self, names: Sequence[str]) -> None:
        """Names of one request's unknown fields; usually none."""
        if not names or (now := monotonic()) < self._quiet_until:
            return
        self._quiet_until = now + INTERVAL_S
        shown = ", ".join(ascii(name[:64]) for name in names[:MAX_NAMES])
        logger.info("ignored unknown fields of a request: %s", shown)
