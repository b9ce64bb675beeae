"""``splitserve simulate``: a cluster of any size under a trace, in virtual time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..engine.latency_profile import Profile
from ..traces.console import result_console, write_json, writing
from ..traces.operators import cut, mean_rate, scaled
from ..traces.readers import open_trace
from ..traces.request import Trace
from .errors import SimulationError
from .settings import SimulateSettings
from .simulator.cluster import Cluster, Pool, PoolRole, alone_on_their_hosts, read_cluster
from .simulator.records import record_file
from .simulator.report import print_report, summary
from .simulator.simulation import Simulation
from .simulator.slo import ServiceLevel, parse_slo
from .simulator.steered import steering_of, steering_summary, steering_words
from .sketched_cluster import print_sketch, sketch_summary, sketched

SAMPLE_S = 0.5


def simulate(settings: SimulateSettings) -> int:
    """The command. Returns its exit status; raises PlannerError, TraceError and EngineError."""
    trace = the_trace(settings.trace, settings.duration_s, settings.rate)
    cluster, level, console = the_cluster(settings), parse_slo(settings.slo), result_console()
    warn_of_no_effect(cluster, console, steers=settings.steer)
    result = (_sketch if settings.sketch else _simulate)(settings, trace, cluster, level, console)
    if settings.json_file is not None:
        write_json(settings.json_file, result, SimulationError)
    return 0


def _simulate(
    settings: SimulateSettings, trace: Trace, cluster: Cluster, level: ServiceLevel, console: Console
) -> dict[str, Any]:
    steering = None
    if settings.steer:
        believed = Profile.read(settings.steer_profile) if settings.steer_profile else None
        steering = steering_of(cluster, level, believed)
    wants_timeline = settings.plot_file is not None or settings.html_file is not None
    with record_file(settings.records) as on_record:
        sample_s = SAMPLE_S if wants_timeline else None
        simulation = Simulation(cluster, settings.seed, level.bounds, on_record, sample_s, steering=steering)
        began = time.process_time()
        simulation.run(trace)
        took = time.process_time() - began
    print_report(simulation, console)
    result = summary(simulation)
    if level.share_given and not level.bounds.levels:
        print_wanted(result, level, console)
    if steering is not None:
        left_alone = Simulation(cluster, settings.seed, level.bounds)
        left_alone.run(trace)
        result["steering"] = steering_summary(simulation, steering, left_alone)
        for line in steering_words(simulation, steering, left_alone):
            console.print(line, highlight=False, markup=False)
    console.print(f"{simulation.num_ended / took:,.0f} simulated requests a second of processor time")
    if settings.plot_file is not None:
        from .simulator.timeline import draw_timeline

        with writing(settings.plot_file, SimulationError):
            draw_timeline(settings.plot_file, simulation.timeline)
    if settings.html_file is not None:
        from .simulator.timeline import write_view

        with writing(settings.html_file, SimulationError):
            write_view(settings.html_file, simulation.timeline)
    return result


def _sketch(
    settings: SimulateSettings, trace: Trace, cluster: Cluster, level: ServiceLevel, console: Console
) -> dict[str, Any]:
    began = time.process_time()
    found = sketched(cluster, trace, level.bounds)
    took = time.process_time() - began
    result = sketch_summary(found, cluster, trace, level.bounds)
    print_sketch(result, console)
    if level.share_given:
        print_wanted(result, level, console)
    console.print(f"{found.num_ended / took:,.0f} sketched requests a second of processor time")
    return result


def warn_of_no_effect(cluster: Cluster, console: Console, steers: bool) -> None:
    """Print which parts of the cluster's description change nothing."""
    warnings = [alone_on_their_hosts(cluster.workers_per_host, (pool.profile for pool in cluster.pools))]
    if not steers and any(pool.flexible for pool in cluster.pools):
        warnings.append("`flexible: true` changes nothing without --steer: nobody orders a change of role.")
    for warning in filter(None, warnings):
        console.print(f"[yellow]{warning}[/yellow]", highlight=False)


def print_wanted(result: dict[str, Any], level: ServiceLevel, console: Console) -> None:
    """Print whether as many requests were good as ``--slo`` asks for, and add that share to the result."""
    result["attainment_wanted"] = level.attainment
    asked = f"{100 * level.attainment:g} of a hundred were asked for"
    enough = result["attainment"] >= level.attainment
    console.print(
        f"That is enough: {asked}." if enough else f"[yellow]That is too few: {asked}.[/yellow]",
        highlight=False,
    )


def the_trace(path: Path, duration_s: float | None, rate: float | None) -> Trace:
    """The trace of this file, its first ``duration_s`` seconds, compressed to ``rate`` requests a second."""
    trace = open_trace(path)
    if duration_s is not None and (first := next(iter(trace), None)) is not None:
        trace = cut(trace, first.arrival_s, first.arrival_s + duration_s, None)
    return scaled(trace, rate / mean_rate(trace)) if rate is not None else trace


def the_cluster(settings: SimulateSettings) -> Cluster:
    """Return the cluster of the file, or of the numbers of workers."""
    if settings.cluster is not None:
        return read_cluster(settings.cluster)
    assert settings.profile is not None, "one of the two is given"
    profile = Profile.read(settings.profile)
    counts: tuple[tuple[PoolRole, int], ...] = (
        ("prefill", settings.prefill),
        ("decode", settings.decode),
        ("colocated", settings.colocated),
    )
    pools = tuple(
        Pool(
            role=role,
            count=count,
            profile=profile,
            max_batch_tokens=settings.max_batch_tokens,
            max_num_seqs=settings.max_num_seqs,
            flexible=settings.steer and role != "colocated",
        )
        for role, count in counts
        if count
    )
    if not pools or (not settings.colocated and not (settings.prefill and settings.decode)):
        raise SimulationError("a cluster needs --prefill and --decode workers, or --colocated ones")
    return Cluster(pools=pools)
