"""The registry of live workers, by role: which take work, which fit together, which are dead, what their
caches hold. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import asdict

from ...transport.messages.messages import (
    BlockEvents,
    Drain,
    Flip,
    Hello,
    Load,
    ModelIdentity,
    Role,
    from_hashes,
)
from .limits import LifecycleLimits
from .worker import OpenWorkers, WorkerId, WorkerRecord

MAX_REASONS = 64  # remembered of workers that are gone
MAX_MISFIT = 4096  # characters of the sentence for the worker's log


class Pools:
    """The pool of prefill workers and the pool of decode workers."""

    def __init__(self, limits: LifecycleLimits) -> None:
        self._limits = limits
        self._num_come = 0
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.reasons_lost: dict[WorkerId, str] = {}  # why the latest of the workers that are gone are gone
        self._open: dict[Role, OpenWorkers] = {"prefill": OpenWorkers(), "decode": OpenWorkers()}
        self._kinds: dict[ModelIdentity, int] = {}
        self.gap_ended = 0.0  # when workers of both roles were last here again
        self.version = 0  # incremented whenever a worker comes or goes
        self.max_sequence_tokens = 0  # what every worker can hold, or could when there last was one
        self._workers_changed()

    def of_role(self, role: Role) -> list[WorkerRecord]:
        """Return all workers of this role."""
        return self._of_role[role]

    def open_of_role(self, role: Role) -> OpenWorkers:
        """Return the workers of this role that take new work."""
        return self._open[role]

    # --- coming and going ------------------------------------------------------------------------------

    def add(self, hello: Hello, now: float) -> list[WorkerRecord]:
        """Take in a worker. Return its earlier incarnations, which are dead."""
        before = self.gap
        replaced = [
            w
            for w in self.workers.values()
            if w.hello.worker_id == hello.worker_id and w.id[1] != hello.incarnation
        ]
        for worker in replaced:
            del self.workers[worker.id]
            self._unlist(worker)
        known = self.workers.get((hello.worker_id, hello.incarnation))
        if known is not None:
            known.last_seen = now
        else:
            kind = self._kinds.setdefault(hello.model, len(self._kinds))
            self._num_come += 1
            worker = WorkerRecord(
                hello, now, kind, self._num_come, self._limits.queued_batches, progressed=now
            )
            self.workers[worker.id] = worker
            worker.listed = self._open[worker.role]
            worker.listed.add(worker)
        self._workers_changed()
        if before and not self.gap:
            self.gap_ended = now
        return replaced

    def close(self, worker: WorkerRecord, order: Drain | Flip | None) -> None:
        """Give the worker no new work. ``order``: what it is told until it reports that it drains."""
        worker.draining, worker.drain = True, order
        self._unlist(worker)

    def remove(self, worker: WorkerRecord, reason: str) -> None:
        """Remove a worker that is gone."""
        self.workers.pop(worker.id, None)
        self.reasons_lost[worker.id] = reason
        if len(self.reasons_lost) > MAX_REASONS:
            del self.reasons_lost[next(iter(self.reasons_lost))]
        self._unlist(worker)
        self._workers_changed()

    def _unlist(self, worker: WorkerRecord) -> None:
        if worker.listed is not None:
            worker.listed.remove(worker)
            worker.listed = None

    def _workers_changed(self) -> None:
        """Work out what depends only on which workers are here."""
        self.version += 1
        workers = self.workers.values()
        self._of_role: dict[Role, list[WorkerRecord]] = {
            "prefill": [w for w in workers if w.role == "prefill"],
            "decode": [w for w in workers if w.role == "decode"],
        }
        self.gap = _gap(self._of_role["prefill"], self._of_role["decode"])
        """Why no request can be served, as a sentence; empty if a prefill and a decode worker fit
        together."""
        self.has_mixed = any(w.hello.mixed for w in workers)
        """Whether any worker's process has both roles."""
        self.all_fit = not self.has_mixed and len({(w.kind, w.max_model_len) for w in workers}) == 1
        """Whether every prefill worker fits every decode worker, and all hold sequences of the same
        length."""
        if workers:
            self.max_sequence_tokens = min(w.max_model_len for w in workers)
        for worker in workers:
            worker.misfit = ""
        for worker, other in self._misfits():
            worker.misfit = _misfit_for_worker(worker, other)

    # --- what they report ------------------------------------------------------------------------------

    def report(self, load: Load, now: float) -> WorkerRecord | None:
        """Take a heartbeat. Return None if there is no such worker."""
        worker = self.workers.get((load.worker_id, load.incarnation))
        if worker is None:
            return None
        if not load.busy or worker.load is None or load.steps > worker.load.steps:
            worker.progressed = now
        worker.last_seen, worker.unreached_since = now, None
        worker.report(load)
        if load.draining:
            self.close(worker, None)
        return worker

    def update_cache(self, events: BlockEvents) -> None:
        """Take what a worker's prefix cache gained and lost. A report that is old, or follows a missing
        one, is ignored."""
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

    def reached(self, worker_id: WorkerId, connected: bool, now: float) -> None:
        """Note that a message was sent to this worker, and whether there was a connection."""
        if (worker := self.workers.get(worker_id)) is None:
            return
        if connected:
            worker.unreached_since = None
        elif worker.unreached_since is None:
            worker.unreached_since = now

    # --- whether they live -----------------------------------------------------------------------------

    def overdue(self, heartbeat_s: float, now: float) -> list[WorkerRecord]:
        """Return the workers whose heartbeat is late, or that could not be reached the last time."""
        workers = self.workers.values()
        return [w for w in workers if now - w.last_seen > 1.2 * heartbeat_s or w.unreached_since is not None]

    def forgive(self, seconds: float) -> None:
        """Count a stall of the coordinator itself as no worker's silence."""
        for worker in self.workers.values():
            worker.last_seen += seconds
            worker.progressed += seconds
            if worker.unreached_since is not None:
                worker.unreached_since += seconds

    def dead(self, now: float) -> list[tuple[WorkerRecord, str]]:
        """Return the workers that are silent, or busy without progress, for too long, each with the
        reason."""
        limits, found = self._limits, []
        for worker in self.workers.values():
            silent_s = now - worker.last_seen
            stuck_s = worker.last_seen - worker.progressed  # silence tells nothing of progress
            if worker.ended:
                continue
            if worker.unreached_since is not None and now - worker.unreached_since > limits.unreachable_s:
                found.append((worker, f"its connection is gone, and it has been silent for {silent_s:.1f} s"))
            elif silent_s > limits.dead_after_s:
                found.append((worker, f"silent for {silent_s:.1f} s"))
            elif stuck_s > limits.progress_timeout_s:
                found.append((worker, f"busy without finishing a step for {stuck_s:.1f} s"))
        return found

    # --- which fit together ----------------------------------------------------------------------------

    def misfits(self) -> list[str]:
        """Return a sentence for each worker that fits none of the other role's workers, though there are
        some."""
        return [
            f"{worker.role} worker {worker.hello.worker_id} gets no work: it does not fit "
            f"{other.role} worker {other.hello.worker_id}: {_difference(worker, other)}"
            for worker, other in self._misfits()
        ]

    def _misfits(self) -> Iterator[tuple[WorkerRecord, WorkerRecord]]:
        """Yield each of these with one of the other role's workers."""
        prefills, decodes = self._of_role["prefill"], self._of_role["decode"]
        for workers, others in ((prefills, decodes), (decodes, prefills)):
            kinds = {other.kind for other in others}
            yield from ((worker, others[0]) for worker in workers if others and worker.kind not in kinds)


def _gap(prefills: list[WorkerRecord], decodes: list[WorkerRecord]) -> str:
    if not prefills and not decodes:
        return "no worker is connected"
    if not prefills or not decodes:
        return f"no {'decode' if prefills else 'prefill'} worker is connected"
    models = {w.hello.model for w in prefills}
    if any(w.hello.model in models for w in decodes):
        return ""
    a, b = prefills[0], decodes[0]
    names = f"prefill worker {a.hello.worker_id} and decode worker {b.hello.worker_id}"
    return f"{names} do not fit together: {_difference(a, b)}"


def _difference(a: WorkerRecord, b: WorkerRecord) -> str:
    name, ours, theirs = _first_difference(a, b)
    return f"their {name} differs ({ours!r} and {theirs!r})"


def _misfit_for_worker(worker: WorkerRecord, other: WorkerRecord) -> str:
    """Return the sentence for the worker's own log."""
    name, ours, theirs = _first_difference(worker, other)
    sentence = (
        f"this {worker.role} worker gets no work: it fits no {other.role} worker, and its {name} is not "
        f"that of {other.hello.worker_id} ({ours!r} here, {theirs!r} there); "
        "start all workers of a model with the same model and options"
    )
    return sentence[:MAX_MISFIT]


def _first_difference(a: WorkerRecord, b: WorkerRecord) -> tuple[str, object, object]:
    """Return the first field in which their models differ, and both values."""
    ours, theirs = asdict(a.hello.model), asdict(b.hello.model)
    name = next(name for name in ours if ours[name] != theirs[name])
    return name.replace("_", " "), ours[name], theirs[name]
