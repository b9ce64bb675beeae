"""Which request kills workers? Pure.

A worker's death is charged to the requests that it ran. Who was there at several deaths in a row, without progress between, is a suspect.
Suspects run one a worker: if that worker dies too, this one was it, and its neighbours are not charged, but for those that were beside one
at the last death as well: else who kills workers would go free for as long as it meets others that are suspected. What counts as progress
doubles with each death beyond the first few of a request: who kills a worker every few tokens is found too, and long answers outlive many
deaths that are none of theirs. So one poisonous request costs a bounded number of workers, and nobody else's request fails for it.
"""

from __future__ import annotations

from .flight import Flight
from .flight_table import FlightTable
from .limits import LifecycleLimits
from .worker import Worker

PROGRESS_TOKENS = 16
"""An attempt that brought so many was worth it: what failed before counts no more. (Of deaths this holds for the first ``max_deaths`` of a
request; from then on each death doubles it.)"""


class Suspicion:
    """Charges deaths, and says who is to run apart."""

    def __init__(self, table: FlightTable, limits: LifecycleLimits) -> None:
        self._table, self._limits = table, limits
        self._suspects: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def charge(self, worker: Worker) -> list[Flight]:
        """This worker has died. Returns those of its requests that are tried no more."""
        here = [self._table.by_dispatch[d] for d in sorted(worker.dispatches)]
        running = [f for f in here if _ran(f, worker)]
        for flight in running:
            self.credit(flight)
        a_suspect_ran = any(f.suspect for f in running)
        for flight in running:
            flight.excused = a_suspect_ran and not flight.suspect and not flight.excused
        guilty = [f for f in running if not f.excused]
        for flight in guilty:
            flight.num_deaths += 1
            flight.num_deaths_ever += 1
            if flight.num_deaths >= self._limits.suspect_after:
                flight.suspect = True
                self._suspects[flight.request.request_id] = flight
        return [f for f in guilty if f.num_deaths >= self._limits.max_deaths]

    def credit(self, flight: Flight) -> None:
        """Progress clears a request: of deaths once, and then new progress is asked for."""
        gained = flight.num_gained
        if gained >= PROGRESS_TOKENS:
            flight.num_failures = 0
        if gained >= PROGRESS_TOKENS << max(0, flight.num_deaths_ever - self._limits.max_deaths):
            flight.num_deaths, flight.num_tokens_before, flight.excused = 0, len(flight.tokens), False
            self.forget(flight)

    def credit_all(self) -> None:
        """Whoever has made progress is no suspect any more."""
        for flight in list(self._suspects.values()):
            self.credit(flight)

    def forget(self, flight: Flight) -> None:
        """It has ended, or is cleared."""
        flight.suspect = False
        self._suspects.pop(flight.request.request_id, None)

    def allowed(self, flight: Flight, workers: list[Worker]) -> list[Worker]:
        """Where it may run: a suspect where no other suspect is, with as little company as there is; others rather not beside one."""
        if not self._suspects:
            return workers
        watched = {id(w) for f in self._suspects.values() if f is not flight for w in (f.prefill, f.decode)}
        apart = [w for w in workers if id(w) not in watched]
        if not flight.suspect:
            return apart or workers
        least = min((len(w.dispatches) for w in apart), default=0)
        return [w for w in apart if len(w.dispatches) == least]


def _ran(flight: Flight, worker: Worker) -> bool:
    if flight.stage == "prefill":
        return flight.prefill is worker
    return flight.decode is worker
