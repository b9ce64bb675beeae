"""The workers as the coordinator knows them: who lives, how full they are, what their caches really hold. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import asdict

from ...transport.messages.messages import BlockEvents, Drain, Flip, Hello, Load, ModelIdentity, Role, from_hashes
from .open_workers import OpenWorkers
from .worker import QUEUED_BATCHES, Worker, WorkerId


class Pools:
    """The registry of live workers, by role."""

    def __init__(self, dead_after_s: float, progress_timeout_s: float, unreachable_s: float, queued_batches: int = QUEUED_BATCHES) -> None:
        self._dead_after_s, self._progress_timeout_s, self._unreachable_s = dead_after_s, progress_timeout_s, unreachable_s
        self._queued_batches = queued_batches
        self._num_come = 0
        self.workers: dict[WorkerId, Worker] = {}
        self._open: dict[Role, OpenWorkers[Worker]] = {"prefill": OpenWorkers(), "decode": OpenWorkers()}
        self._kinds: dict[ModelIdentity, int] = {}
        self.num_changes = 0  # who is here has changed so often
        self.max_sequence_tokens = 0
        """The longest sequence that every live worker can hold, or could when there last was one."""
        self._came_or_went()

    def of_role(self, role: Role) -> list[Worker]:
        return self._of_role[role]

    def open_of_role(self, role: Role) -> OpenWorkers[Worker]:
        """Those that take new work."""
        return self._open[role]

    def close(self, worker: Worker, order: Drain | Flip | None) -> None:
        """It gets no new work, and leaves; ``order``: what it is told until it says that it drains."""
        worker.draining, worker.drain = True, order
        self._unlist(worker)

    def _unlist(self, worker: Worker) -> None:
        if worker.listed is not None:
            worker.listed.remove(worker)
            worker.listed = None

    def _came_or_went(self) -> None:
        """Works out what depends only on who is here."""
        self.num_changes += 1
        workers = self.workers.values()
        self._of_role: dict[Role, list[Worker]] = {
            "prefill": [w for w in workers if w.role == "prefill"],
            "decode": [w for w in workers if w.role == "decode"],
        }
        self.gap = _gap(self._of_role["prefill"], self._of_role["decode"])
        """Why no request can be served now, as a sentence; empty where at least one prefill and one decode worker fit together."""
        self.has_mixed = any(w.hello.mixed for w in workers)
        """Whether any worker's process is of both roles."""
        self.all_fit = not self.has_mixed and len({(w.kind, w.max_model_len) for w in workers}) == 1
        """Whether any prefill worker's KV cache may go to any decode worker, and all hold sequences of the same length."""
        if workers:
            self.max_sequence_tokens = min(w.max_model_len for w in workers)
        for worker in workers:
            worker.misfit = ""
        for worker, other in self._misfits():
            worker.misfit = _sentence_for(worker, other)

    def add(self, hello: Hello, now: float) -> list[Worker]:
        """A worker says hello. Returns its earlier incarnations, which are dead."""
        replaced = [w for w in self.workers.values() if w.hello.worker_id == hello.worker_id and w.id[1] != hello.incarnation]
        for worker in replaced:
            del self.workers[worker.id]
            self._unlist(worker)
        known = self.workers.get((hello.worker_id, hello.incarnation))
        if known is not None:
            known.heard = now
        else:
            kind = self._kinds.setdefault(hello.model, len(self._kinds))
            self._num_come += 1
            worker = Worker(hello, now, kind, self._num_come, self._queued_batches, progressed=now)
            self.workers[worker.id] = worker
            worker.listed = self._open[worker.role]
            worker.listed.add(worker)
        self._came_or_went()
        return replaced

    def remove(self, worker: Worker) -> None:
        self.workers.pop(worker.id, None)
        self._unlist(worker)
        self._came_or_went()

    def hear(self, load: Load, now: float) -> Worker | None:
        """A heartbeat. None: no such worker lives."""
        worker = self.workers.get((load.worker_id, load.incarnation))
        if worker is None:
            return None
        if not load.busy or worker.load is None or load.steps > worker.load.steps:
            worker.progressed = now
        worker.heard, worker.unreached_since = now, None
        worker.report(load)
        if load.draining:
            self.close(worker, None)
        return worker

    def book(self, events: BlockEvents) -> None:
        """What a worker's prefix cache gained and lost. A report that is old, or has one missing before it, is not booked."""
        worker = self.workers.get((events.worker_id, events.incarnation))
        if worker is None or events.number <= worker.num_cache_reports:
            return
        if events.reset:
            worker.cached.clear()
        elif events.number != worker.num_cache_reports + 1:
            return
        worker.num_cache_reports = events.number
        worker.cached.update(from_hashes(events.stored))
        worker.cached.difference_update(from_hashes(events.removed))

    def misfits(self) -> list[str]:
        """A sentence for each worker that fits none of the other role's workers, though there are some."""
        return [
            f"{worker.role} worker {worker.hello.worker_id} gets no work: it does not fit {other.role} worker "
            f"{other.hello.worker_id}: {_difference(worker, other)}"
            for worker, other in self._misfits()
        ]

    def _misfits(self) -> Iterator[tuple[Worker, Worker]]:
        """Each with one of the other role's workers, none of which it fits."""
        prefills, decodes = self._of_role["prefill"], self._of_role["decode"]
        for workers, others in ((prefills, decodes), (decodes, prefills)):
            kinds = {other.kind for other in others}
            yield from ((worker, others[0]) for worker in workers if others and worker.kind not in kinds)

    def overdue(self, heartbeat_s: float, now: float) -> list[Worker]:
        """Those whose heartbeat should have come, or that could not be reached the last time."""
        workers = self.workers.values()
        return [worker for worker in workers if now - worker.heard > 1.2 * heartbeat_s or worker.unreached_since is not None]

    def forgive(self, seconds: float) -> None:
        """So long the coordinator itself stood still: it counts as nobody's silence."""
        for worker in self.workers.values():
            worker.heard += seconds
            if worker.unreached_since is not None:
                worker.unreached_since += seconds
            worker.progressed += seconds

    def dead(self, now: float) -> list[tuple[Worker, str]]:
        """Workers that are silent, or busy without progress, for too long, each with the reason."""
        found = []
        for worker in self.workers.values():
            if worker.ended:
                continue
            if worker.unreached_since is not None and now - worker.unreached_since > self._unreachable_s:
                found.append((worker, f"its connection is gone, and it has been silent for {now - worker.heard:.1f} s"))
            elif now - worker.heard > self._dead_after_s:
                found.append((worker, f"silent for {now - worker.heard:.1f} s"))
            elif (stood_s := worker.heard - worker.progressed) > self._progress_timeout_s:  # by its own words: who is silent says nothing
                found.append((worker, f"busy without finishing a step for {stood_s:.1f} s"))
        return found


def _gap(prefills: list[Worker], decodes: list[Worker]) -> str:
    if not prefills and not decodes:
        return "no worker is connected"
    if not prefills or not decodes:
        return f"no {'decode' if prefills else 'prefill'} worker is connected"
    models = {w.hello.model for w in prefills}
    if any(w.hello.model in models for w in decodes):
        return ""
    a, b = prefills[0], decodes[0]
    return f"prefill worker {a.hello.worker_id} and decode worker {b.hello.worker_id} do not fit together: {_difference(a, b)}"


def _difference(a: Worker, b: Worker) -> str:
    name, ours, theirs = _first_difference(a, b)
    return f"their {name} differs ({ours!r} and {theirs!r})"


def _sentence_for(worker: Worker, other: Worker) -> str:
    """What the worker's own log is to say."""
    name, ours, theirs = _first_difference(worker, other)
    says = f"this {worker.role} worker gets no work: it fits no {other.role} worker, and its {name} is not that of {other.hello.worker_id}"
    return f"{says} ({ours!r} here, {theirs!r} there); start all workers of a model with the same model and options"[:4096]


def _first_difference(a: Worker, b: Worker) -> tuple[str, object, object]:
    """The field of their models' identities, and both values."""
    ours, theirs = asdict(a.hello.model), asdict(b.hello.model)
    name = next(name for name in ours if ours[name] != theirs[name])
    return name.replace("_", " "), ours[name], theirs[name]
