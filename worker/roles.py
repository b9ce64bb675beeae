"""The roles of a worker's process: how one begins beside another, and how one ends. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.cache.block_manager import BlockManager
from ..engine.errors import EngineError
from ..engine.role_core import BROKEN_AFTER, RoleCore
from ..transport.messages.messages import Role

_log = logging.getLogger(__name__)


def worker_name(process: str, role: str) -> str:
    """Return the name that a process has as a worker of this role."""
    return f"{process}:{role}"


@dataclass(frozen=True, slots=True)
class RoleHost:
    """What a role knows of its process, where that can change its role or plays both: another role may use
    the same blocks."""

    process: str
    """The process's name."""
    blocks: BlockManager
    """The blocks of its one KV cache."""
    flip: Callable[[str], bool]
    """Begins the role of this name beside this one. False: it cannot yet, for the last one of that role still
    leaves."""
    incarnations: Callable[[], int]
    """Returns the next incarnation number of any of its roles."""
    linger_s: float = 1.0
    """Seconds that a role at rest still answers its peers: a lease of one may wait for its last message."""
    mixed: bool = False
    """It plays both roles for good."""
    home: Literal["", Role] = ""
    """The role that a mixed process prefers: it gets work of the other one only under pressure. Empty: it
    prefers neither."""
    for_decode: Callable[[], int] = lambda: 0
    """Returns how many blocks prompts must leave to the sequences that this process generates for."""

    def hands_to_itself(self, decode_worker: str) -> bool:
        """Return whether this decode worker shares the blocks of the prompts that are computed here."""
        return self.mixed and decode_worker == worker_name(self.process, "decode")


class Departure:
    """Decides when a role ends. ``host`` is None where the process has only this role and cannot change
    it."""

    def __init__(self, core: RoleCore[Any, Any], role: str, host: RoleHost | None) -> None:
        self._core, self._role, self._host = core, role, host
        self.ordered = False  # the process is to end; set from a signal handler
        self._rests_since: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the role ends as soon as nothing is left here."""
        return self.ordered or self._core.drains

    def begin(self, now: float) -> None:
        """End the role as soon as nothing is left here."""
        if not self.has_begun:
            self._core.drain(now)

    def flip(self, role: str, timeout_s: float | None, now: float) -> None:
        """Begin the other role in this process and drain this one."""
        if self._host is None:
            _log.error(
                "told to become a %s worker, but this process cannot change its role: start it as "
                "`splitserve worker`",
                role,
            )
        elif role != self._role and self._host.flip(role):
            self._core.drain(now, timeout_s)

    def is_due(self, now: float) -> bool:
        """Return whether the role may end now.

        A process that ends takes its memory along; one that goes on in the other role must have every block
        back first."""
        if self._host is None or self._host.mixed or self.ordered:
            return self._core.may_leave
        if not (self._core.may_leave and self._core.at_rest):
            self._rests_since = None
            return False
        self._rests_since = now if self._rests_since is None else self._rests_since
        return now - self._rests_since >= self._host.linger_s

    def raise_if_broken(self) -> None:
        """Raise EngineError if every step fails: the supervisor starts the process anew, its requests go on
        elsewhere."""
        if self._core.step_failures.means_broken:
            raise EngineError(
                f"the last {BROKEN_AFTER} requests' steps all failed, one by one: this worker ends, to be "
                "started anew; see above for why"
            )
