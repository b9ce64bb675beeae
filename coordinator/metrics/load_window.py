"""The load of the last minute: what requests took by stage, and how full workers were. Pure; times in
seconds.

Requests are counted as they end and closed into one ``Tally`` a period, together with a look at the system;
``window`` sums them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..lifecycle.time_ledger import NAMES
from .objectives import Objectives
from .request_record import RequestRecord
from .system_snapshot import CounterGrowth, SystemSnapshot, WorkerSnapshot

WINDOW_S = 60.0
MAX_MEASURED = 200
"""Requests of a period whose own times are kept: the newest ones, where there were more."""
ROLES = ("prefill", "decode")
LIFECYCLE = ("workers_lost", "redispatches", "recoveries")
WORKERS = ("preemptions", "mover_fallbacks")


class PoolLook(NamedTuple):
    """The workers of one role at one moment, or on average."""

    num_workers: float = 0.0
    busy: float | None = None  # share of their time in which a step ran; None: not known
    kv: float = 0.0  # share of their KV blocks that requests hold or have been granted
    rows: float = 0.0  # share of their batch rows that sequences hold; 0: the number of rows is not known
    running: float = 0.0  # sequences a worker


class Tally(NamedTuple):
    """One period."""

    until: float
    seconds: float
    num_ended: int  # requests of any status
    num_measured: int  # of these, requests that were answered whole
    stages: NDArray[np.float64]  # [num_stages] seconds, over the measured ones
    ttft_s: float  # sum over the measured ones, from the mean of ``times``
    # [<= MAX_MEASURED, 4]: TTFT, TPOT, the operator's TTFT bound for the request's class, whole stay
    times: NDArray[np.float64]
    num_failed: int  # 5xx
    num_refused: int  # 429
    num_waiting: int
    num_running: int
    pools: Mapping[str, PoolLook]
    grown: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Window:
    """What ``diagnosis`` goes by; means over requests or over looks. A new one is an idle system of one
    worker a role."""

    seconds: float = 60.0
    ready: bool = True
    gap: str = ""
    num_ended: int = 0
    num_measured: int = 0
    stages: Mapping[str, float] = field(default_factory=dict)  # mean seconds of a request, by stage
    ttft_s: float = 0.0
    num_failed: int = 0
    num_refused: int = 0
    waiting: float = 0.0
    running: float = 0.0
    growth: float = 0.0  # requests in the system at the end, less those at the beginning
    now_waiting: int = 0
    now_running: int = 0
    pools: Mapping[str, PoolLook] = field(default_factory=lambda: dict.fromkeys(ROLES, PoolLook(1.0, 0.0)))
    most_workers: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(ROLES, 1.0))
    grown: Mapping[str, float] = field(default_factory=dict)
    lost: Sequence[str] = ()  # "name (why)" of workers that were lost in this time
    objectives: Objectives = field(default_factory=Objectives)
    kept: float | None = None  # share of the measured and refused or failed requests that kept the objectives
    # of single requests, by "ttft", "tpot" and "e2e"
    times: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    ttft_missed: float = 0.0  # share of the measured ones
    tpot_missed: float = 0.0

    @property
    def total_s(self) -> float:
        """A request's mean time from arrival to its last byte."""
        return sum(self.stages.values())

    def share(self, *stages: str) -> float:
        """Return the stages' share of requests' time."""
        return sum(self.stages.get(stage, 0.0) for stage in stages) / self.total_s if self.total_s else 0.0


class LoadWindow:
    """Keeps a minute of tallies."""

    def __init__(self, objectives: Objectives | None = None) -> None:
        self.objectives = objectives or Objectives()
        """The operator's."""
        self.tallies: deque[Tally] = deque()
        self._worker_growth = CounterGrowth(*WORKERS)
        self._before: Mapping[str, float] | None = None

    def close(
        self,
        now: float,
        seconds: float,
        records: Sequence[RequestRecord],
        refusals: Mapping[str, int],
        system: SystemSnapshot,
    ) -> Tally:
        """Ends a period. ``refusals``: requests of this period that were answered with 429 or 5xx, by
        status."""
        measured = [r for r in records if r.status == "200" and r.first_token_at]
        newest = measured[-MAX_MEASURED:]
        times = np.array(
            [(_ttft(r), _tpot(r), self.objectives.ttft_of(r.priority_class), r.total) for r in newest]
        ).reshape(-1, 4)
        counters = system.counters
        before, self._before = self._before or counters, dict(counters)
        tally = Tally(
            until=now,
            seconds=seconds,
            num_ended=len(records),
            num_measured=len(measured),
            stages=np.array([r.stages for r in measured]).sum(axis=0) if measured else np.zeros(len(NAMES)),
            ttft_s=float(times[:, 0].mean()) * len(measured) if len(times) else 0.0,
            times=times,
            num_failed=sum(count for status, count in refusals.items() if status >= "500"),
            num_refused=refusals.get("429", 0),
            num_waiting=system.num_waiting,
            num_running=system.num_running,
            pools={role: _look([w for w in system.workers if w.role == role]) for role in ROLES},
            grown={
                **{name: counters.get(name, 0.0) - before.get(name, 0.0) for name in LIFECYCLE},
                **self._worker_growth.since_last(system.workers),
            },
        )
        self.tallies.append(tally)
        while self.tallies[0].until <= now - WINDOW_S:
            self.tallies.popleft()
        return tally

    def window(
        self, system: SystemSnapshot, lost: Sequence[str] = (), objectives: Objectives | None = None
    ) -> Window:
        """The last minute, up to ``system``. ``objectives``: others than the operator's."""
        objectives = self.objectives if objectives is None else objectives
        tallies, looks = self.tallies, [tally.pools for tally in self.tallies]
        num_measured = sum(t.num_measured for t in tallies)
        num_failed, num_refused = sum(t.num_failed for t in tallies), sum(t.num_refused for t in tallies)
        seconds = sum((t.stages for t in tallies), np.zeros(len(NAMES))) / max(1, num_measured)
        times = np.concatenate([t.times for t in tallies]) if tallies else np.zeros((0, 4))
        slow_ttft, slow_tpot = _misses(times, objectives)
        num_tried = num_measured + num_failed + num_refused
        return Window(
            seconds=sum(t.seconds for t in tallies),
            ready=system.ready,
            gap=system.gap,
            num_ended=sum(t.num_ended for t in tallies),
            num_measured=num_measured,
            stages=dict(zip(NAMES, seconds.tolist(), strict=True)),
            ttft_s=sum(t.ttft_s for t in tallies) / max(1, num_measured),
            num_failed=num_failed,
            num_refused=num_refused,
            waiting=_mean([t.num_waiting for t in tallies]),
            running=_mean([t.num_running for t in tallies]),
            growth=_in_system(tallies[-1]) - _in_system(tallies[0]) if tallies else 0.0,
            now_waiting=system.num_waiting,
            now_running=system.num_running,
            pools={role: _average([look[role] for look in looks], system, role) for role in ROLES},
            most_workers={
                role: max((look[role].num_workers for look in looks), default=0.0) for role in ROLES
            },
            grown={name: sum(t.grown[name] for t in tallies) for name in (*LIFECYCLE, *WORKERS)},
            lost=lost,
            objectives=objectives,
            kept=float(1 - (slow_ttft | slow_tpot).mean()) * num_measured / num_tried
            if objectives and len(times)
            else None,
            times={"ttft": times[:, 0], "tpot": times[times[:, 1] > 0, 1], "e2e": times[:, 3]},
            ttft_missed=float(slow_ttft.mean()) if len(times) else 0.0,
            tpot_missed=float(slow_tpot.mean()) if len(times) else 0.0,
        )


def _misses(
    times: NDArray[np.float64], objectives: Objectives
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[num_requests] each: its first token came too late, its tokens came too slowly."""
    by_class = objectives.ttft_s is None and bool(objectives.ttft_by_class)
    ttft = times[:, 2] if by_class else float("inf") if objectives.ttft_s is None else objectives.ttft_s
    tpot = float("inf") if objectives.tpot_s is None else objectives.tpot_s
    return times[:, 0] > ttft, times[:, 1] > tpot


def _look(workers: Sequence[WorkerSnapshot]) -> PoolLook:
    if not workers:
        return PoolLook()
    blocks, rows = sum(w.blocks_total for w in workers), sum(w.max_num_seqs for w in workers)
    running, known = sum(w.num_running for w in workers), [w.busy for w in workers if w.busy is not None]
    return PoolLook(
        num_workers=len(workers),
        busy=fmean(known) if known else None,
        kv=sum(w.blocks_used + w.blocks_leased for w in workers) / blocks if blocks else 0.0,
        rows=running / rows if rows else 0.0,
        running=running / len(workers),
    )


def _average(looks: Sequence[PoolLook], system: SystemSnapshot, role: str) -> PoolLook:
    """Over the looks, but of as many workers as there are now."""
    busy = [look.busy for look in looks if look.busy is not None]
    return PoolLook(
        num_workers=sum(worker.role == role for worker in system.workers),
        busy=fmean(busy) if busy else None,
        kv=_mean([look.kv for look in looks]),
        rows=_mean([look.rows for look in looks]),
        running=_mean([look.running for look in looks]),
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _in_system(tally: Tally) -> int:
    return tally.num_waiting + tally.num_running


def _ttft(record: RequestRecord) -> float:
    """From arrival to the first token; the request had one."""
    return record.first_token_at - record.ledger.begin


def _tpot(record: RequestRecord) -> float:
    """Mean time of the tokens after the first; 0 where there is none."""
    ended = record.ledger.end - record.stages.stream
    if record.num_output_tokens > 1:
        return (ended - record.first_token_at) / (record.num_output_tokens - 1)
    return 0.0
