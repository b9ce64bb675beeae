"""What the cluster looked like over time: samples whose number stays bounded, for plots and the HTML view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

MOST = 600
"""Samples; beyond it every second one is dropped, and sampling goes on half as often."""


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """``used`` and ``cached``: shares of the KV cache; ``busy``: share of the time since the last sample in
    which a step ran."""

    running: int
    waiting: int
    used: float
    cached: float
    busy: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. ``workers``: in the order of ``Timeline.names``."""

    at_s: float
    queued: int
    open: int
    arrived: int
    ended: int
    workers: tuple[WorkerSample, ...]


class Timeline:
    """``interval_s`` grows with the simulated time."""

    def __init__(self, names: Sequence[str], interval_s: float) -> None:
        self.names = list(names)
        self.interval_s = interval_s
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) > MOST:
            self.samples = self.samples[1::2]
            self.interval_s *= 2


PAGE = Path(__file__).with_name("view.html")


def write_view(path: Path, timeline: Timeline) -> None:
    """Write the page to scrub through a simulation: every worker's KV cache and queue at any time. One file,
    no network."""
    content = orjson.dumps(
        {"names": timeline.names, "samples": timeline.samples}, option=orjson.OPT_SERIALIZE_DATACLASS
    )
    text = content.decode().replace("</", "<\\/")  # no end tag inside the script
    path.write_text(PAGE.read_text(encoding="utf-8").replace("__DATA__", text), encoding="utf-8")


def rows_by_pool(names: Sequence[str]) -> dict[str, list[int]]:
    """``names``: of workers, ``ROLE-POOL-NUMBER`` or, where a process may have both roles,
    ``ROLE-POOL-NUMBER:ROLE``. A pool is called by its role where no other one has it, else ``ROLE-POOL``."""
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name.rpartition("-")[0], []).append(row)
    roles = [pool.partition("-")[0] for pool in found]
    return {
        role if roles.count(role) == 1 else pool: rows
        for role, (pool, rows) in zip(roles, found.items(), strict=True)
    }


def draw_timeline(path: Path, timeline: Timeline) -> None:
    """Requests in the system, busy devices, KV caches, by pool; a PNG."""
    at = [s.at_s for s in timeline.samples]
    from matplotlib.figure import Figure  # an extra: planning runs without it

    figure = Figure((12, 11))
    axes = figure.subplots(4, 1, sharex=True)
    axes[0].plot(at, [s.open for s in timeline.samples], label="in the system")
    axes[0].plot(at, [s.queued for s in timeline.samples], label="waiting in the coordinator")
    axes[0].set(ylabel="requests")
    for pool, chosen in rows_by_pool(timeline.names).items():
        for axis, value in ((1, "busy"), (2, "used"), (3, "running")):
            values = np.array([[getattr(s.workers[i], value) for i in chosen] for s in timeline.samples])
            (line,) = axes[axis].plot(at, values.mean(axis=1), label=pool)
            axes[axis].fill_between(
                at, values.min(axis=1), values.max(axis=1), alpha=0.2, color=line.get_color()
            )
    for axis, label in ((1, "busy share"), (2, "KV cache used"), (3, "sequences in steps, each")):
        axes[axis].set(ylabel=label, ylim=(0, None))
    for one in axes:
        one.legend(loc="upper right")
    axes[3].set(xlabel="seconds of the trace (line: mean of the pool; shade: least and most)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
