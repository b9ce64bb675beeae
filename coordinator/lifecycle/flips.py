"""Workers that change their role in place: who may, what they are told, and how long it took. Pure; times in seconds.

order --Flip--> the worker that is there drains; its process says hello as a worker of the other role --first work--> ... --goodbye-->
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from ...transport.messages.messages import Flip, Role
from .state import LifecycleState
from .worker import Worker


@dataclass(slots=True)
class FlipRecord:
    """One change of role. ``*_s``: seconds after it was ordered; None: not yet."""

    process: str
    role: Role  # the new one
    ordered: float
    began_s: float | None = None  # it said hello in its new role
    worked_s: float | None = None  # a first token came from it, or a sequence joined it
    ended_s: float | None = None  # nothing of the old role was left

    def as_json(self, now: float) -> dict[str, Any]:
        """``ordered_s``: how long ago it was ordered."""
        said = asdict(self)
        return {"ordered_s": round(now - said.pop("ordered"), 3), **said}


class Flips:
    """Orders changes of roles, and sees them through."""

    def __init__(self, state: LifecycleState) -> None:
        self._state = state
        self.under_way: dict[str, FlipRecord] = {}
        self.latest: deque[FlipRecord] = deque(maxlen=50)
        self.awaited: set[str] = set()  # processes that have not worked in their new role yet
        self.count = 0

    def order(self, name: str, role: Role, timeout_s: float | None, now: float) -> FlipRecord | str | None:
        """``name``: of a worker or of its process. A sentence where it cannot be; None: no such worker is here."""
        known = [w for w in self._state.pools.workers.values() if name in (w.hello.process, w.hello.worker_id)]
        worker = next((w for w in known if not w.draining), None)
        if not known:
            return None
        if worker is None:
            return f"{name} leaves"
        if reason := self._obstacle(worker, role):
            return reason
        process = worker.hello.process
        told = Flip(coordinator=self._state.incarnation, role=role, timeout_s=timeout_s)
        self._state.pools.close(worker, told)
        self._state.send(worker, told)
        record = self.under_way[process] = FlipRecord(process, role, now)
        self.latest.append(record)
        self.count += 1
        return record

    def _obstacle(self, worker: Worker, role: Role) -> str:
        name = worker.hello.process
        if not name:
            startable = "`splitserve worker`, or by `splitserve up --flexible`,"
            return f"{worker.hello.worker_id} cannot change its role: only what was started as {startable} can"
        if worker.hello.mixed:
            return f"{name} is a mixed worker: it is of both roles already"
        if name in self.under_way or any(w.hello.process == name and w is not worker for w in self._state.pools.workers.values()):
            return f"{name} is changing its role already"
        if worker.role == role:
            return f"{name} is a {role} worker already"
        pools = self._state.pools
        others = [w for w in pools.open_of_role(worker.role) if w is not worker and w.kind == worker.kind]
        without = "without one nothing can be served"
        if worker.role == "prefill" and pools.has_mixed:
            others = [w for w in others if not w.hello.mixed]
            without = "mixed ones compute for themselves alone, and decode workers would get nothing"
        return "" if others else f"{name} is the last {worker.role} worker: {without}"

    def hello(self, worker: Worker, now: float) -> None:
        """A worker is here: perhaps one that had to change its role."""
        record = self.under_way.get(worker.hello.process)
        if record is not None and record.role == worker.role and record.began_s is None:
            record.began_s = now - record.ordered
            self.awaited.add(record.process)
            self._close(record)

    def worked(self, worker: Worker, now: float) -> None:
        """A request has reached a milestone at a worker whose process is ``awaited``."""
        for record in reversed(self.latest):
            if record.process == worker.hello.process:
                if record.role == worker.role:
                    record.worked_s = now - record.ordered
                    self.awaited.discard(record.process)
                return

    def gone(self, worker: Worker, now: float) -> None:
        """A worker has left, or is dead. With its process all of a change ends."""
        process = worker.hello.process
        record = self.under_way.get(process)
        if record is not None and record.role != worker.role:
            record.ended_s = now - record.ordered
            self._close(record)
        if not any(w.hello.process == process for w in self._state.pools.workers.values()):
            self.under_way.pop(process, None)
            self.awaited.discard(process)

    def _close(self, record: FlipRecord) -> None:
        if record.began_s is not None and record.ended_s is not None:
            self.under_way.pop(record.process, None)
