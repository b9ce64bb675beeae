"""Workers that change their role in place: which may, and how long it took. Pure; times in seconds.

order --Flip--> the worker drains; its process sends Hello in the other role --first work-->
      ... --Goodbye of the old role-->
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from ...transport.messages.messages import Flip, Role
from .actions import Action, Send
from .pools import Pools
from .worker import WorkerRecord


@dataclass(slots=True)
class FlipRecord:
    """One change of role. ``*_s``: seconds after it was ordered; None: not yet."""

    process: str
    role: Role  # the new one
    ordered: float
    began_s: float | None = None  # its Hello in the new role came
    worked_s: float | None = None  # it sent its first FirstToken or Joined
    ended_s: float | None = None  # nothing of the old role was left

    def as_json(self, now: float) -> dict[str, Any]:
        """Return the record, JSON-ready. ``ordered_s``: how long ago it was ordered."""
        fields = asdict(self)
        return {"ordered_s": round(now - fields.pop("ordered"), 3), **fields}


class Flips:
    """Orders changes of roles, and follows them."""

    def __init__(self, incarnation: int, pools: Pools) -> None:
        self._incarnation, self._pools = incarnation, pools
        self.under_way: dict[str, FlipRecord] = {}  # by process
        self.latest: deque[FlipRecord] = deque(maxlen=50)
        self.awaited: set[str] = set()  # processes that have not worked in their new role yet
        self.count = 0

    def order(
        self, name: str, role: Role, timeout_s: float | None, now: float
    ) -> tuple[FlipRecord | str | None, list[Action]]:
        """Order a change of role; ``name``: of a worker or its process.

        Return its record, or the reason it is impossible as a sentence, or None for an unknown worker.
        """
        known = [w for w in self._pools.workers.values() if name in (w.hello.process, w.hello.worker_id)]
        worker = next((w for w in known if not w.draining and not w.is_reserve), None)
        if not known:
            return None, []
        if worker is None:
            return f"{name} drains and ends; once it is back it can change its role", []
        if reason := self._obstacle(worker, role):
            return reason, []
        process = worker.hello.process
        record = FlipRecord(process, role, now)
        self.latest.append(record)
        self.count += 1
        if halves := self._halves(worker):  # it is of both roles already
            self._pools.swap(halves)
            record.began_s = record.ended_s = 0.0
            self.awaited.add(process)
            return record, []
        flip = Flip(coordinator=self._incarnation, role=role, timeout_s=timeout_s)
        self._pools.close(worker, flip)
        self.under_way[process] = record
        return record, [Send(worker.id, flip)]

    def _obstacle(self, worker: WorkerRecord, role: Role) -> str:
        name, pools = worker.hello.process, self._pools
        if not name:
            startable = "`splitserve worker`, or by `splitserve up --flexible`,"
            return (
                f"{worker.hello.worker_id} cannot change its role: only what was started as {startable} can"
            )
        if worker.is_mixed:
            return f"{name} is a mixed worker: it is of both roles already"
        if worker.hello.home and not self._halves(worker):
            return f"{name} starts or drains; try again once it is back"
        if not worker.hello.home and (
            name in self.under_way
            or any(w.hello.process == name and w is not worker for w in pools.workers.values())
        ):
            return f"{name} is changing its role already"
        if worker.role == role:
            return f"{name} is a {role} worker already"
        others = [w for w in pools.open_of_role(worker.role) if w is not worker and w.kind == worker.kind]
        without = "without one nothing can be served"
        if worker.role == "prefill" and pools.has_mixed:
            others = [w for w in others if not w.is_mixed]
            without = "mixed ones compute for themselves alone, and decode workers would get nothing"
        return "" if others else f"{name} is the last {worker.role} worker: {without}"

    def _halves(self, worker: WorkerRecord) -> tuple[WorkerRecord, WorkerRecord] | None:
        return next((halves for halves in self._pools.borrowers() if worker in halves), None)

    def came(self, worker: WorkerRecord, now: float) -> None:
        """Note that a worker is here; this may complete a change of role."""
        record = self.under_way.get(worker.hello.process)
        if record is not None and record.role == worker.role and record.began_s is None:
            record.began_s = now - record.ordered
            self.awaited.add(record.process)
            self._close_if_over(record)

    def worked(self, worker: WorkerRecord, now: float) -> None:
        """Note a milestone that came from a worker; it may be the first of an ``awaited`` process."""
        if worker.hello.process not in self.awaited:
            return
        for record in reversed(self.latest):
            if record.process == worker.hello.process:
                if record.role == worker.role:
                    record.worked_s = now - record.ordered
                    self.awaited.discard(record.process)
                return

    def gone(self, worker: WorkerRecord, now: float) -> None:
        """Note that a worker has left or died. With its process the whole change ends."""
        process = worker.hello.process
        record = self.under_way.get(process)
        if record is not None and record.role != worker.role:
            record.ended_s = now - record.ordered
            self._close_if_over(record)
        if not any(w.hello.process == process for w in self._pools.workers.values()):
            self.under_way.pop(process, None)
            self.awaited.discard(process)

    def _close_if_over(self, record: FlipRecord) -> None:
        if record.began_s is not None and record.ended_s is not None:
            self.under_way.pop(record.process, None)
