"""``splitserve simulate --sketch``: how a cluster would do under a trace, decision by decision, ten to
a hundred times as fast as the simulator."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ..engine.latency_profile import Profile
from ..traces.console import figures_table
from ..traces.request import Trace
from ..transport.process.heap import seldom_collected
from .errors import SimulationError
from .search.demand import arrivals
from .search.sketch import Sketch, Sketched, SketchPool
from .search.step_times import StepTimes
from .simulator.cluster import Cluster, Pool
from .simulator.report import latency_table
from .simulator.slo import Slo
from .simulator.tallies import Distribution

NOTE = (
    "Sketched: the coordinator decides as live; workers and links are formulas. There are no failures, "
    "one prefix cache without bound, and no limit of the queue. Without --sketch it is simulated."
)


def sketched(cluster: Cluster, trace: Trace, bounds: Slo) -> Sketched:
    """Raises SimulationError where the trace is empty, or the cluster has what a sketch does not know."""
    _require_plain(cluster)
    requests = tuple(trace)
    if not requests:
        raise SimulationError(f"{trace.name} has no requests")
    pools = [
        SketchPool(
            StepTimes(_as_linked(pool), pool.max_batch_tokens, pool.max_num_seqs),
            pool.count,
            computes=pool.role != "decode",
            generates=pool.role != "prefill",
        )
        for pool in cluster.pools
    ]
    with seldom_collected(0):  # a run leaves no cycles
        return Sketch(pools, bounds, coordinator_s=cluster.coordinator_s).run(
            arrivals(requests, trace.block_size)
        )


def _require_plain(cluster: Cluster) -> None:
    unknown = [
        (bool(cluster.failures) or cluster.mean_seconds_between_failures is not None, "failures"),
        (cluster.workers_per_host > 1, "workers_per_host"),
        (cluster.routing != "hybrid", f"routing: {cluster.routing}"),
    ]
    if found := [what for is_there, what in unknown if is_there]:
        raise SimulationError(
            f"a sketch knows nothing of {', '.join(found)}: leave out --sketch, or that in the cluster's file"
        )


def _as_linked(pool: Pool) -> Profile:
    """Its profile, with the pool's own memory and link."""
    profile = pool.profile
    link = {"bytes_per_s": pool.bytes_per_s, "message_s": pool.message_s}
    handoff = profile.handoff.model_copy(update=link)
    return profile.model_copy(update={"handoff": handoff, "memory": pool.memory})


def sketch_summary(found: Sketched, cluster: Cluster, trace: Trace, bounds: Slo) -> dict[str, Any]:
    """JSON-ready, as far as a sketch knows it, under the names of ``simulator/report.py``'s ``summary``;
    times in seconds."""
    times = [request.arrival_s for request in trace]
    arriving, elapsed = times[-1] - times[0], max(found.elapsed_s, 1e-9)
    rows = []
    for pool, (with_prompts, without) in zip(cluster.pools, found.busy_s, strict=True):
        of_all = elapsed * pool.count
        busy = {
            "busy": (with_prompts + without) / of_all,
            "busy_prefill": with_prompts / of_all,
            "busy_decode": without / of_all,
        }
        rows.append({"role": pool.role, "count": pool.count, "profile": pool.profile.name, **busy})
    return {
        "sketched": True,
        "requests": {"finished": found.num_ended - found.num_refused},
        "simulated_s": found.elapsed_s,
        "arrivals_s": arriving,
        "offered_per_s": len(times) / arriving if arriving else None,
        "requests_per_s": (found.num_ended - found.num_refused) / elapsed,
        "slo": bounds.words(),
        "attainment": found.attainment,
        "goodput_per_s": found.num_good / arriving if arriving else None,
        "latency_s": {name: _spread(values) for name, values in _latencies(found).items() if values},
        "pools": rows,
    }


def _latencies(found: Sketched) -> dict[str, list[float]]:
    return {
        "ttft": found.ttft_s,
        "tpot": [seconds for seconds in found.tpot_s if seconds],
        "e2e": found.e2e_s,
    }


def _spread(values: list[float]) -> dict[str, float]:
    of = Distribution()
    for value in values:
        of.add(value)
    return of.summary()


def print_sketch(result: dict[str, Any], console: Console) -> None:
    """Print what ``sketch_summary`` returns."""
    console.print(latency_table(result["latency_s"]), "")
    table = figures_table("pool", "workers", "busy", "with prompts", "decode only")
    for row in result["pools"]:
        shares = (f"{row[name]:.0%}" for name in ("busy", "busy_prefill", "busy_decode"))
        table.add_row(row["role"], str(row["count"]), *shares)
    console.print(table)
    console.print(
        f"{result['requests']['finished']:,} finished in {result['simulated_s']:.1f} s", highlight=False
    )
    if result["slo"]:
        console.print(f"{result['slo']}: met by {result['attainment']:.2%} of the requests", highlight=False)
    console.print(NOTE, highlight=False)
