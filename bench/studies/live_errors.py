"""Percentiles of live and simulated requests beside each other, and by how much the simulated are off."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...loadgen.report import Sample, times_of
from ...planner.simulator.cluster import Cluster
from ...planner.simulator.records import RequestRecord
from ...planner.simulator.simulation import Simulation
from ...traces.operators import mean_rate
from ...traces.readers import open_trace
from ...traces.request import Trace
from ..handoff.live_pace import WINDOW_S, LivePace

LATE_S, NUM_LATE = 0.002, 8
"""Lateness of arrivals in seconds, and number of draws, for the range of the simulated percentiles."""


class Replay(NamedTuple):
    """What the clients saw, and when it began (seconds of the monotonic clock)."""

    samples: list[Sample]
    began: float


def simulated(cluster: Cluster, trace: Trace, pace: LivePace | None = None) -> list[RequestRecord]:
    """``pace``: the steps' times are then as they were, with what workers of one host cost each other in
    them."""
    records: list[RequestRecord] = []
    if pace is not None:
        cluster = cluster.model_copy(update={"workers_per_host": 1})
    Simulation(cluster, on_record=records.append, pace=pace).run(trace)
    return records


def late(trace: Trace, seed: int) -> Trace:
    """Each request up to ``LATE_S`` later."""
    draw = random.Random(seed)
    requests = sorted(
        (replace(r, arrival_s=r.arrival_s + draw.uniform(0, LATE_S)) for r in trace),
        key=lambda r: r.arrival_s,
    )
    return Trace(trace.name, lambda: iter(requests), trace.block_size)


Times = dict[str, list[float]]
Percentiles = dict[str, dict[str, float]]


def of_samples(samples: Sequence[Sample]) -> Times:
    times = [times_of(sample) for sample in samples]
    return {
        "ttft": [t.ttft for t in times],
        "tpot": [t.tpot for t in times if t.tpot is not None],
        "e2e": [t.e2e for t in times],
    }


def of_records(records: Sequence[RequestRecord]) -> Times:
    assert all(r.finished for r in records), "every simulated request ends"
    return {
        "ttft": [r.ttft_s for r in records],
        "tpot": [r.tpot_s for r in records if r.tpot_s is not None],
        "e2e": [r.e2e_s for r in records],
    }


def medians(times: Times) -> dict[str, float]:
    return {name: float(np.median(values)) if values else 0.0 for name, values in times.items()}


def compared(
    runs: Sequence[Replay], cluster: Cluster, path: Path, paces: Sequence[LivePace | None]
) -> dict[str, Any]:
    """Percentiles of both, and by how much the simulated are off. Live ones are each the median over the runs
    of the same trace."""
    began = time.process_time()
    records = simulated(cluster, open_trace(path))
    took = time.process_time() - began
    each = [percentiles(of_samples(run.samples)) for run in runs]
    live = medians_of(each)
    modelled = percentiles(of_records(records))
    when_late = [
        percentiles(of_records(simulated(cluster, late(open_trace(path), seed)))) for seed in range(NUM_LATE)
    ]
    return {
        "requests": len(records),
        "rate": mean_rate(open_trace(path)),
        "live": live,
        "live_runs": each,
        "simulated": modelled,
        "error": errors(modelled, live),
        **at_its_pace(cluster, path, live, [pace for pace in paces if pace is not None]),
        "error_when_late": {
            name: {p: extremes(one[name][p] / at - 1 for one in when_late) for p, at in of_name.items()}
            for name, of_name in live.items()
        },
        "simulated_requests_per_cpu_s": len(records) / took,
    }


def at_its_pace(cluster: Cluster, path: Path, live: Percentiles, paces: Sequence[LivePace]) -> dict[str, Any]:
    """The same with the machine's measured speed in each of the runs."""
    if not paces:
        return {}
    modelled = medians_of(
        [percentiles(of_records(simulated(cluster, open_trace(path), pace))) for pace in paces]
    )
    measured = [pace.summary() for pace in paces]
    return {"pace": measured, "simulated_at_its_pace": modelled, "error_at_its_pace": errors(modelled, live)}


def errors(modelled: Percentiles, live: Percentiles) -> Percentiles:
    return {name: {p: modelled[name][p] / of_name[p] - 1 for p in of_name} for name, of_name in live.items()}


def medians_of(each: Sequence[Percentiles]) -> Percentiles:
    """Percentile by percentile."""
    return {
        name: {p: float(np.median([one[name][p] for one in each])) for p in each[0][name]} for name in each[0]
    }


def extremes(values: Iterable[float]) -> tuple[float, float]:
    known = sorted(values)
    return known[0], known[-1]


def percentiles(times: Times) -> Percentiles:
    return {
        name: {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}
        for name, values in times.items()
    }


def show(workload: str, result: dict[str, Any]) -> None:
    stolen = f"the hypervisor gave {result['stolen']:.0%} of the wanted processor time to others"
    print(f"{workload}: {result['requests']} requests at {result['rate']:.2f}/s; {stolen}")
    for name, live in result["live"].items():
        modelled, error = result["simulated"][name], result["error"][name]
        cells = [
            f"{p} {1e3 * live[p]:8.1f} ms{spread(result, name, p)}, simulated {1e3 * modelled[p]:8.1f} "
            f"({error[p]:+.1%})"
            for p in live
        ]
        print(f"  {name:5}" + "   ".join(cells), flush=True)
    for one in result.get("pace", ()):
        text = (
            f"{role} steps took {p['mean']:.2f} times (in {WINDOW_S:g} s: {p['p10']:.2f} to {p['p90']:.2f})"
            for role, p in one.items()
        )
        print(f"  beside the profile, {' and '.join(text)}")
    for name, found in result.get("error_at_its_pace", {}).items():
        print(
            f"  {name:5}told that, the simulator is off by "
            + ", ".join(f"{error:+.1%} ({p})" for p, error in found.items()),
            flush=True,
        )


def spread(result: dict[str, Any], name: str, percentile: str) -> str:
    """Spread of live runs of the same trace; empty for one run."""
    values = [run[name][percentile] for run in result["live_runs"]]
    return f" (runs {min(values) / max(values) - 1:+.1%})" if len(values) > 1 else ""
