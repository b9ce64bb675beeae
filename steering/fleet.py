"""The workers that the pool controller may change, and a decision about one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from ..transport.messages.messages import Role
from .speeds import Speed

AnyRole = Role | Literal["mixed"]
Kind = Literal["flip", "hold", "scale_up", "scale_down"]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The present workers. ``mixed``: those with both roles for good, counted in neither."""

    prefill: int
    decode: int
    flexible: dict[Role, list[str]]
    """Processes that can change their role, by the present one: first to suit the other, then least busy."""
    changing: int = 0
    """Number of processes in mid-flip."""
    max_batch_tokens: int = 512  # of a prefill step
    max_num_seqs: int = 64  # of a decode batch
    spare: dict[Role, list[str]] = field(default_factory=dict)
    """Workers of a role that may leave, the least busy first; one of the role always stays."""
    mixed: int = 0
    in_use: dict[Role, float] = field(default_factory=dict)
    """Measured share of a role's workers that is in use."""
    speeds: dict[Role, list[Speed]] = field(default_factory=dict)
    """By role, one for each worker. Empty: all are as the latency model predicts."""

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def size(self) -> tuple[float, float]:
        """Prefill and decode workers, each counted by its speed."""
        return sum(s.prefill for s in self._of("prefill")), sum(s.decode for s in self._of("decode"))

    def sizes(self) -> dict[int, tuple[float, float]]:
        """Return the same by prefill workers, if those change their role that suit the other best."""
        roles: tuple[Role, Role] = ("prefill", "decode")
        every = [s for role in roles for s in sorted(self._of(role), key=lambda s: s.decode / s.prefill)]
        prompts, answers = (list(accumulate(speed[role] for speed in every)) for role in (0, 1))
        return {n: (prompts[n - 1], answers[-1] - answers[n - 1]) for n in range(1, len(every))}

    def _of(self, role: Role) -> list[Speed]:
        return self.speeds.get(role) or [Speed()] * self.count(role)

    def count(self, role: Role) -> int:
        """Return the number of workers of one role."""
        return self.prefill if role == "prefill" else self.decode

    def use_without(self, role: Role, leaving: int) -> float:
        """Return the share of a role's workers that would be in use if ``leaving`` left; infinite if none
        would be left, or its use is not known."""
        left = self.count(role) - leaving
        return self.in_use.get(role, math.inf) * self.count(role) / left if left > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """``worker`` is empty where the command that starts workers chooses. ``hold``: roles stay as they are; it
    is reported once."""

    at: float  # seconds of the monotonic clock
    kind: Kind
    worker: str
    role: AnyRole  # its new role, or the role of the worker that comes or goes
    reason: str
