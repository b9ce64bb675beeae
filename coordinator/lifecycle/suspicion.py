"""Finds the requests that kill workers. Pure.

A worker's death is charged to the requests that it ran. A request that met several deaths in a row, without
progress in between, is a suspect. Suspects run one per worker. If that worker dies too, the suspect did it,
and its neighbours are not charged, except those that were beside a suspect at the last death as well: else a
killer would go free as long as it meets other suspects. What counts as progress doubles with each death of a
request beyond the first few, so that a request that kills every few tokens is found too, and a long answer
outlives many deaths that it did not cause. One poisonous request thus costs a bounded number of workers, and
no other request fails for it.
"""

from __future__ import annotations

from .limits import LifecycleLimits
from .request import Request
from .worker import WorkerRecord

PROGRESS_TOKENS = 16
"""An attempt that brought this many tokens clears a request of its failures; of its deaths too, for the
first ``max_deaths`` of them. Each further death doubles the tokens that clear it."""


class Suspicion:
    """Charges deaths to requests, and keeps suspects apart."""

    def __init__(self, limits: LifecycleLimits) -> None:
        self._limits = limits
        self.suspects: dict[str, Request] = {}  # by id

    def charge(self, worker: WorkerRecord, requests: list[Request]) -> list[Request]:
        """Charge a worker's death to ``requests``, which were assigned to it. Return those that are not
        tried again."""
        running = [r for r in requests if (r.prefill if r.state == "prefill" else r.decode) is worker]
        for request in running:
            self.credit(request)
        a_suspect_ran = any(r.suspect for r in running)
        for request in running:
            request.excused = a_suspect_ran and not request.suspect and not request.excused
        charged = [r for r in running if not r.excused]
        for request in charged:
            request.num_deaths += 1
            request.num_deaths_ever += 1
            if request.num_deaths >= self._limits.suspect_after:
                request.suspect = True
                self.suspects[request.request_id] = request
        return [r for r in charged if r.num_deaths >= self._limits.max_deaths]

    def credit(self, request: Request) -> None:
        """Clear a request that has made progress. What cleared it of deaths does not count again."""
        gained = request.num_gained
        if gained >= PROGRESS_TOKENS:
            request.num_failures = 0
        if gained >= PROGRESS_TOKENS << max(0, request.num_deaths_ever - self._limits.max_deaths):
            request.num_deaths, request.num_tokens_before, request.excused = 0, len(request.tokens), False
            self.forget(request)

    def credit_all(self) -> None:
        """Clear the suspects that have made progress."""
        for request in list(self.suspects.values()):
            self.credit(request)

    def forget(self, request: Request) -> None:
        """Stop suspecting a request that has ended, or is cleared."""
        request.suspect = False
        self.suspects.pop(request.request_id, None)

    def allowed(self, request: Request, workers: list[WorkerRecord]) -> list[WorkerRecord]:
        """Return the workers where it may run: a suspect apart from other suspects and with the fewest
        neighbours, any other request preferably apart from suspects."""
        if not self.suspects:
            return workers
        watched = {id(w) for r in self.suspects.values() if r is not request for w in (r.prefill, r.decode)}
        apart = [w for w in workers if id(w) not in watched]
        if not request.suspect:
            return apart or workers
        least = min((len(w.dispatches) for w in apart), default=0)
        return [w for w in apart if len(w.dispatches) == least]
