"""Adapters that requests may name as their model, by the reports of workers. Pure.

A name stands for one content: of those that a prefill and a decode worker that fit together have, the one
that most workers have under this name; of equals, the one reported last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ...transport.messages.messages import Adapter, BlockEvents
from . import worker_fit
from .worker import WorkerId, WorkerRecord

NOTHING: Mapping[str, str] = {}


class AdapterNames(NamedTuple):
    """Contents of adapters by name."""

    served: Mapping[str, str] = NOTHING
    absent: Mapping[str, str] = NOTHING
    """No fitting pair of workers has these now: some have, or workers that are gone had."""
    complete: bool = True  # every worker has reported


class AdapterIndex:
    """The adapters of all workers. Only this class changes a worker's ``adapters``."""

    def __init__(self, workers: Mapping[WorkerId, WorkerRecord]) -> None:
        self._workers = workers
        self.taken = frozenset[str]()  # the model's own names, which no adapter is served under
        self.version = 0  # incremented whenever an adapter or a worker comes or goes
        self._num_reported = 0
        self._reported: dict[Adapter, int] = {}  # when a worker last had it anew
        self._lost: dict[str, str] = {}  # names of workers that are gone, by content, until the next report
        self._names: AdapterNames | None = None  # None: to be worked out
        self._served = frozenset[str]()

    def report(self, worker: WorkerRecord, events: BlockEvents) -> None:
        """Take a report, by which ``worker`` may have other adapters."""
        if events.adapters is None and not events.reset:
            return
        adapters, before = events.adapters or (), set(worker.adapters)
        for adapter in adapters:
            if adapter not in before:
                self._num_reported += 1
                self._reported[adapter] = self._num_reported
        worker.adapters, worker.contents = adapters, frozenset(adapter.content for adapter in adapters)
        self._lost.clear()
        self.changed()

    def gone(self, worker: WorkerRecord) -> None:
        """Remember the names of a worker that is gone: it may come back."""
        self._lost |= {adapter.content: adapter.name for adapter in worker.adapters if adapter.name}

    def changed(self) -> None:
        """Note that an adapter or a worker has come or gone."""
        self.version += 1
        self._names = None

    @property
    def conflicts(self) -> frozenset[str]:
        """The names of adapters that are not served because the model has them."""
        return self.taken.intersection(adapter.name for adapter in self._reported)

    def serves(self, content: str) -> bool:
        """Whether a prefill and a decode worker that fit together have it."""
        self.names()
        return content in self._served

    def may_return(self, content: str) -> bool:
        """Whether some worker has it, or one that is gone had."""
        return content in self._lost or any(content in w.contents for w in self._workers.values())

    def names(self) -> AdapterNames:
        """Return the names that stand for adapters now."""
        if self._names is None:
            self._names = self._worked_out()
        return self._names

    def _worked_out(self) -> AdapterNames:
        workers, holders, counts = self._workers.values(), dict[str, list[WorkerRecord]](), Counter[Adapter]()
        for worker in workers:
            counts.update(worker.adapters)
            for content in worker.contents:
                holders.setdefault(content, []).append(worker)
        self._reported = {adapter: self._reported[adapter] for adapter in counts}
        self._served = frozenset(c for c, having in holders.items() if worker_fit.has_pair(having))
        chosen = {name: content for content, name in self._lost.items()}
        for adapter in sorted(
            counts, key=lambda a: (a.content in self._served, counts[a], self._reported[a])
        ):
            chosen[adapter.name] = adapter.content
        names: tuple[dict[str, str], dict[str, str]] = {}, {}
        for name in sorted(chosen.keys() - self.taken - {""}):
            names[chosen[name] not in self._served][name] = chosen[name]
        return AdapterNames(*names, bool(workers) and all(w.num_cache_reports for w in workers))


def sentence(name: str) -> str:
    """Return why a request for this adapter is not served."""
    return f"the adapter {name!r} is on no prefill and decode worker that fit together any more"
