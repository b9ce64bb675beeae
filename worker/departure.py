"""How a worker's loop ends in good order: it is told to leave, drains, and may go once nothing is left here; or its steps raise whoever is
in them."""

from __future__ import annotations

import logging
from typing import Protocol

from ..engine.errors import EngineError
from ..engine.step.step_failures import BROKEN_AFTER
from .role_host import RoleHost

_log = logging.getLogger(__name__)


class DrainingCore(Protocol):
    """A worker's core, as far as its end goes."""

    @property
    def drains(self) -> bool: ...
    @property
    def may_leave(self) -> bool: ...
    @property
    def at_rest(self) -> bool: ...
    @property
    def is_broken(self) -> bool: ...
    def drain(self, now: float, timeout_s: float | None = None) -> None: ...


class Departure:
    """Of the worker of one ``role``; ``host``: its process, where that can change its role, or has both."""

    def __init__(self, core: DrainingCore, role: str, host: RoleHost | None) -> None:
        self._core, self._role, self._host = core, role, host
        self.ordered = False  # its process is to end; set from a signal handler
        self._rests_since: float | None = None

    @property
    def has_begun(self) -> bool:
        """It leaves as soon as nothing is left here."""
        return self.ordered or self._core.drains

    def flip(self, role: str, timeout_s: float | None, now: float) -> None:
        """The other role begins in this process, and this one ends."""
        if self._host is None:
            _log.error("told to become a %s worker, but this process cannot change its role: start it as `splitserve worker`", role)
        elif role != self._role and self._host.flip(role):
            self._core.drain(now, timeout_s)

    def is_due(self, now: float) -> bool:
        """A process that ends takes its memory along; one that goes on in the other role must have every block back."""
        if self._host is None or self._host.mixed or self.ordered:
            return self._core.may_leave
        if not (self._core.may_leave and self._core.at_rest):
            self._rests_since = None
            return False
        self._rests_since = now if self._rests_since is None else self._rests_since
        return now - self._rests_since >= self._host.linger_s

    def raise_if_broken(self) -> None:
        """Raises EngineError: whoever started this process starts it anew, and its requests go on elsewhere meanwhile."""
        if self._core.is_broken:
            raise EngineError(
                f"the last {BROKEN_AFTER} requests' steps all failed, one by one: this worker ends, to be started anew; see above for why"
            )
