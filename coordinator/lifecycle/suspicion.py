"""Which request kills workers? Pure.

A worker's death is charged to the requests that it ran. Who was there at several deaths in a row, without progress between, is a suspect.
Suspects run one a worker: if that worker dies too, this one was it, and its neighbours are not charged, but for those that were beside one
at the last death as well: else who kills workers would go free for as long as it meets others that are suspected. What counts as progress
doubles with each death beyond the first few of a request: who kills a worker every few tokens is found too, and long answers outlive many
deaths that are none of theirs. So one poisonous request costs a bounded number of workers, and nobody else's request fails for it.
"""

from __future__ import annotations

from .assignments import Assignments
from .limits import LifecycleLimits
from .request import Request
from .worker import Worker

PROGRESS_TOKENS = 16
"""An attempt that brought so many was worth it: what failed before counts no more. (Of deaths this holds for the first ``max_deaths`` of a
request; from then on each death doubles it.)"""


class Suspicion:
    """Charges deaths, and says who is to run apart."""

    def __init__(self, table: Assignments, limits: LifecycleLimits) -> None:
        self._table, self._limits = table, limits
        self._suspects: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def charge(self, worker: Worker) -> list[Request]:
        """This worker has died. Returns those of its requests that are tried no more."""
        here = [self._table.by_dispatch[d] for d in sorted(worker.dispatches)]
        running = [f for f in here if _ran(f, worker)]
        for request in running:
            self.credit(request)
        a_suspect_ran = any(f.suspect for f in running)
        for request in running:
            request.excused = a_suspect_ran and not request.suspect and not request.excused
        guilty = [f for f in running if not f.excused]
        for request in guilty:
            request.num_deaths += 1
            request.num_deaths_ever += 1
            if request.num_deaths >= self._limits.suspect_after:
                request.suspect = True
                self._suspects[request.request_id] = request
        return [f for f in guilty if f.num_deaths >= self._limits.max_deaths]

    def credit(self, request: Request) -> None:
        """Progress clears a request: of deaths once, and then new progress is asked for."""
        gained = request.num_gained
        if gained >= PROGRESS_TOKENS:
            request.num_failures = 0
        if gained >= PROGRESS_TOKENS << max(0, request.num_deaths_ever - self._limits.max_deaths):
            request.num_deaths, request.num_tokens_before, request.excused = 0, len(request.tokens), False
            self.forget(request)

    def credit_all(self) -> None:
        """Whoever has made progress is no suspect any more."""
        for request in list(self._suspects.values()):
            self.credit(request)

    def forget(self, request: Request) -> None:
        """It has ended, or is cleared."""
        request.suspect = False
        self._suspects.pop(request.request_id, None)

    def allowed(self, request: Request, workers: list[Worker]) -> list[Worker]:
        """Where it may run: a suspect where no other suspect is, with as little company as there is; others rather not beside one."""
        if not self._suspects:
            return workers
        watched = {id(w) for f in self._suspects.values() if f is not request for w in (f.prefill, f.decode)}
        apart = [w for w in workers if id(w) not in watched]
        if not request.suspect:
            return apart or workers
        least = min((len(w.dispatches) for w in apart), default=0)
        return [w for w in apart if len(w.dispatches) == least]


def _ran(request: Request, worker: Worker) -> bool:
    if request.state == "prefill":
        return request.prefill is worker
    return request.decode is worker
