"""The workers that the pool controller may change, and a decision about one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..transport.messages.messages import Role
from .scaling import AnyRole, Kind


@dataclass(frozen=True, slots=True)
class Fleet:
    """The present workers. ``mixed``: those with both roles for good, counted in neither."""

    prefill: int
    decode: int
    flexible: dict[Role, list[str]]
    """Processes that can change their role, by the present one; the least busy first."""
    changing: int = 0
    """Number of processes in mid-flip."""
    max_batch_tokens: int = 512  # of a prefill step
    max_num_seqs: int = 64  # of a decode batch
    spare: dict[Role, str] = field(default_factory=dict)
    """The worker of a role that could leave most easily, if one may and it is not the last."""
    mixed: int = 0
    in_use: dict[Role, float] = field(default_factory=dict)
    """Measured share of a role's workers that is in use."""

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.mixed


@dataclass(frozen=True, slots=True)
class Decision:
    """``worker`` is empty where the command that starts workers chooses. ``hold``: roles stay as they are; it
    is reported once."""

    at: float  # seconds of the monotonic clock
    kind: Literal["flip", "hold"] | Kind
    worker: str
    role: AnyRole  # its new role, or the role of the worker that comes or goes
    reason: str
