"""The live workers by role. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

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
from . import worker_fit
from .adapters import AdapterIndex
from .cache_index import CacheIndex
from .limits import LifecycleLimits
from .open_workers import OpenWorkers
from .worker import WorkerId, WorkerRecord

MAX_REASONS = 64  # remembered of workers that are gone
LONG_STALL_S = 1.5  # from which on ZeroMQ's heartbeats end connections
REJOIN_S = 2.0  # ZeroMQ connects again after at most 1.05 s, with all workers at once


class Pools:
    """The pool of prefill workers and the pool of decode workers."""

    def __init__(self, limits: LifecycleLimits) -> None:
        self._limits = limits
        self._num_come = 0
        self.all_here = float("-inf")
        """When the workers of a coordinator before this one have come back. Without this wait 2 of 31 clients
        that came again at once had their answer computed anew in a live cluster, with it none of 17."""
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.cache, self.adapters = CacheIndex(), AdapterIndex(self.workers)
        self.reasons_lost: dict[WorkerId, str] = {}  # why the latest of the workers that are gone are gone
        self._open: dict[Role, OpenWorkers] = {"prefill": OpenWorkers(), "decode": OpenWorkers()}
        self._reserves: dict[Role, OpenWorkers] = {"prefill": OpenWorkers(), "decode": OpenWorkers()}
        self._kinds: dict[ModelIdentity, int] = {}
        self.lends_decode = True  # decode workers may borrow prompts
        self.vocabulary = ""  # the name of the coordinator's own; empty: it is not compared
        self.size = ""  # of its model, in words; empty likewise
        self.gap_ended = 0.0  # when workers of both roles were last here again
        self.version = 0  # incremented whenever a worker comes or goes
        self.max_sequence_tokens = 0  # what every worker can hold, or could when there last was one
        self._workers_changed()

    def of_role(self, role: Role) -> list[WorkerRecord]:
        """Return all workers of this role."""
        return self._of_role[role]

    def open_of_role(self, role: Role) -> OpenWorkers:
        """Return the workers of this role that take new work, without reserves."""
        return self._open[role]

    def reserves_of_role(self, role: Role) -> OpenWorkers:
        """Return the workers of this role that take borrowed work: their processes prefer the other role."""
        return self._reserves[role]

    def borrowers(self) -> Iterator[tuple[WorkerRecord, WorkerRecord]]:
        """Yield the prefill and the decode worker of each process that may borrow now."""
        for reserve in chain(self._reserves["prefill"], self._reserves["decode"]):
            home = self._home_of.get(reserve.process)
            if home is not None and home.listed is not None:
                yield (reserve, home) if reserve.role == "prefill" else (home, reserve)

    def keeping(self, answer_id: bytes) -> WorkerRecord | None:
        """Return a decode worker that keeps this answer."""
        return next((w for w in self.of_role("decode") if answer_id in w.answers and not w.ended), None)

    # --- coming and going ------------------------------------------------------------------------------

    def on_another_host(self, hello: Hello) -> Hello | None:
        """Return the Hello of the worker with this name on another host; None: there is none."""
        named = (w.hello for w in self.workers.values() if w.hello.worker_id == hello.worker_id)
        return next((found for found in named if found.host != hello.host), None)

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
            worker.list_in(None)
            self.cache.clear(worker)
            self.adapters.gone(worker)
        if (known := self.workers.get((hello.worker_id, hello.incarnation))) is not None:
            known.last_seen = now
        else:
            kind = self._kinds.setdefault(worker_fit.kv_model(hello.model), len(self._kinds))
            self._num_come += 1
            if not self.workers:
                self.all_here = now + self._limits.lost_after_s
            worker = WorkerRecord(
                hello, now, kind, self._num_come, self._limits.queued_batches, progressed=now
            )
            self.workers[worker.id] = worker
            for other in self.workers.values():
                if hello.home and other.process == worker.process and other is not worker:
                    worker.is_reserve = not other.is_reserve  # it may have been flipped
            worker.list_in((self._reserves if worker.is_reserve else self._open)[worker.role])
        self._workers_changed()
        if before and not self.gap:
            self.gap_ended = now
        return replaced

    def swap(self, halves: tuple[WorkerRecord, WorkerRecord]) -> None:
        """Let a process that borrows prefer its other role. ``halves``: one of ``borrowers``."""
        for worker in halves:
            worker.list_in(None)
            worker.is_reserve, worker.num_borrowed = not worker.is_reserve, 0
        self._workers_changed()
        for worker in halves:
            worker.list_in((self._reserves if worker.is_reserve else self._open)[worker.role])

    def close(self, worker: WorkerRecord, order: Drain | Flip | None) -> None:
        """Give the worker no new work. ``order`` is repeated to it until it reports that it drains."""
        worker.draining, worker.drain = True, order
        worker.list_in(None)

    def remove(self, worker: WorkerRecord, reason: str) -> None:
        """Remove a worker that is gone."""
        self.workers.pop(worker.id, None)
        self.reasons_lost[worker.id] = reason
        if len(self.reasons_lost) > MAX_REASONS:
            del self.reasons_lost[next(iter(self.reasons_lost))]
        worker.list_in(None)
        self.cache.clear(worker)
        self.adapters.gone(worker)
        self._workers_changed()

    def process_ending(self, worker: WorkerRecord) -> None:
        """Give the worker no new work, and do not count its silence: its process has ended."""
        worker.ended = True
        worker.list_in(None)

    def _workers_changed(self) -> None:
        """Work out what depends only on which workers are here."""
        self.version += 1
        self.adapters.changed()
        workers = self.workers.values()
        self._of_role: dict[Role, list[WorkerRecord]] = {
            "prefill": [w for w in workers if w.role == "prefill"],
            "decode": [w for w in workers if w.role == "decode"],
        }
        prefills, decodes = self._of_role["prefill"], self._of_role["decode"]
        self.gap = worker_fit.gap(prefills, decodes)
        """Why no request can be served, as a sentence; empty if some pair fits together."""
        self.has_mixed = any(w.is_mixed for w in workers)
        """Whether any worker's process has both roles, and prefers neither."""
        self._home_of = {w.process: w for w in workers if w.hello.home and not w.is_reserve}
        """By process: its worker of the role that it prefers, where the process may borrow."""
        for worker in workers:
            worker.home = self._home_of.get(worker.process) if worker.is_reserve else None
        kinds = {(w.kind, w.max_model_len, w.hello.takes_images) for w in workers}
        self.all_fit = not self.has_mixed and len(kinds) == 1
        """Whether every prefill worker fits every decode worker, and all hold sequences of the same length
        and images, or none."""
        self.without_images = [w.hello.worker_id for w in workers if not w.hello.takes_images]
        """Workers that take no prompts with images."""
        if workers:
            self.max_sequence_tokens = min(w.max_model_len for w in workers)
        for worker in workers:
            worker.misfit = ""
        for worker, other in worker_fit.misfits(prefills, decodes):
            worker.misfit = worker_fit.sentence_for_worker(worker, other)

    def misfits(self) -> list[str]:
        """Return sentences about workers that fit none of the other role's, and about several revisions."""
        pairs = worker_fit.misfits(self._of_role["prefill"], self._of_role["decode"])
        misfits = [worker_fit.sentence_for_log(*pair) for pair in pairs]
        return misfits + worker_fit.revisions(list(self.workers.values()))

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
        """Take the changes of a worker's prefix cache. An old report, or one after a gap, is ignored."""
        worker = self.workers.get((events.worker_id, events.incarnation))
        if worker is None or events.number <= worker.num_cache_reports:
            return
        if events.reset:
            self.cache.clear(worker)
            worker.answers.clear()
        elif events.number != worker.num_cache_reports + 1:
            return
        worker.num_cache_reports = events.number
        before = self.adapters.version
        self.adapters.report(worker, events)
        self.version += self.adapters.version != before
        self.cache.store(worker, from_hashes(events.stored))
        self.cache.remove(worker, from_hashes(events.removed))
        worker.answers.update(from_hashes(events.answers_kept))
        worker.answers.difference_update(from_hashes(events.answers_dropped))

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
        """Count a stall of the coordinator itself as no worker's silence, and after a long one the time to
        connect again, too."""
        seconds += REJOIN_S if seconds >= LONG_STALL_S else 0.0
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
            silent_s = max(0.0, now - worker.last_seen)
            stuck_s = worker.last_seen - worker.progressed  # silence shows nothing about progress
            if worker.ended:
                continue
            gone_at = worker.unreached_since
            if gone_at is not None and now - max(gone_at, worker.last_seen) > limits.unreachable_s:
                found.append((worker, f"its connection is gone, and it has been silent for {silent_s:.1f} s"))
            elif silent_s > limits.dead_after_s:
                found.append((worker, f"silent for {silent_s:.1f} s"))
            elif stuck_s > limits.progress_timeout_s:
                found.append((worker, f"busy without finishing a step for {stuck_s:.1f} s"))
        return found
