"""What the parts of the lifecycle share: the books, the bounds, and what is to be done. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...transport.messages.messages import Cancel, Message, u32
from .actions import Action, Send
from .assignments import Assignments
from .forecast import Forecast
from .limits import LifecycleLimits
from .pools import Pools
from .request import Request
from .request_queue import RequestQueue
from .suspicion import Suspicion
from .worker import Worker

LATE_TICK_S = 0.2
"""Ticks come at least ten times a second: after so long without one the coordinator itself stood still."""


@dataclass(slots=True)
class LifecycleState:
    """One coordinator's books. ``actions`` are carried out in order once the lifecycle returns."""

    incarnation: int
    limits: LifecycleLimits
    table: Assignments = field(default_factory=Assignments)
    actions: list[Action] = field(default_factory=list)
    gap_ended: float = 0.0  # when workers of both roles were last here again
    heard_all_at: float = float("-inf")  # everything that had been said to this coordinator by then has been heard
    resumed_at: float = float("-inf")  # it last stood still until then
    forecast: Forecast = field(default_factory=Forecast)
    pools: Pools = field(init=False)
    line: RequestQueue = field(init=False)
    suspicion: Suspicion = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.pools = Pools(limits.dead_after_s, limits.progress_timeout_s, limits.unreachable_s, limits.queued_batches)
        self.line = RequestQueue(limits.starving_s)
        self.suspicion = Suspicion(self.table, limits)

    def send(self, worker: Worker, message: Message) -> None:
        """To be said to this worker."""
        self.actions.append(Send(worker.id, message))

    def disown(self, worker: Worker | None, dispatches: Iterable[int]) -> None:
        """The worker, if it is still here, is to drop these dispatches."""
        if worker is not None and worker.id in self.pools.workers:
            self.send(worker, Cancel(coordinator=self.incarnation, dispatches=u32(list(dispatches))))

    def book_stall(self, request: Request, now: float) -> None:
        """Charge what the coordinator's last stall took of the newest stage to the coordinator, where no worker says otherwise."""
        began, ended = self.heard_all_at, self.resumed_at
        if ended < began:
            ended = now
        if LATE_TICK_S < ended - began < float("inf") and request.ledger.newest_began < ended:
            request.ledger.enter("coordinator", began)
            request.ledger.enter(request.state, ended)

    def take(self) -> list[Action]:
        """What is to be done since the last call."""
        actions, self.actions = self.actions, []
        return actions
