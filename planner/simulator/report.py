"""The results of a simulation: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ...traces.console import figures_table
from .simulation import Simulation
from .tallies import Tallies

EXPLAINED = {
    "tpot": "time per token after the first: (last - first) / (tokens - 1)",
    "tpot_all": "the same over all tokens: (end - first) / tokens",
    "gap": "between two decode steps, for each sequence in both",
    "queue": (
        "waiting for a worker and on it; with prefill, (exposed) handoff, decode and coordinator it "
        "sums to e2e"
    ),
}


def summary(simulation: Simulation) -> dict[str, Any]:
    """JSON-ready; times in seconds. ``goodput_per_s`` is attainment times the offered rate; throughputs are
    over the whole run, which ends with the last answer."""
    tallies, elapsed, arriving = simulation.tallies, simulation.elapsed_s, simulation.arrival_span_s
    return {
        "requests": dict(sorted(tallies.outcomes.items())),
        "simulated_s": elapsed,
        "arrivals_s": arriving,
        "offered_per_s": simulation.num_arrived / arriving if arriving else None,
        "requests_per_s": tallies.outcomes["finished"] / elapsed if elapsed else 0.0,
        "output_tokens_per_s": tallies.num_output_tokens / elapsed if elapsed else 0.0,
        "cached_share": tallies.num_cached_tokens / max(1, tallies.num_prompt_tokens),
        "slo": tallies.slo.words(),
        "levels": levels(tallies),
        "attainment": tallies.attainment,
        "goodput_per_s": simulation.goodput_per_s,
        "latency_s": tallies.percentiles(),
        "pools": pools(simulation),
        "redispatched": int(simulation.coordinator.core.counters()["redispatches"]),
        "killed": simulation.num_killed,
        "steps_outside_the_profile": outside(simulation),
    }


def levels(tallies: Tallies) -> list[dict[str, Any]]:
    """What each level asks for, and which share of the requests meets it; empty without levels."""
    num = max(1, tallies.num_requests)
    return [
        {"bound": level.words(), "share": level.share, "met": 1 - missed / num}
        for level, missed in zip(tallies.slo.levels, tallies.missed, strict=False)
    ]


def pools(simulation: Simulation) -> list[dict[str, Any]]:
    """How busy each pool was, and its energy, where its profile knows the power."""
    rows = []
    for pool in simulation.cluster.pools:
        machines = [m for m in simulation.machines if m.pool is pool]
        prefill_s = sum(m.device.prefill_s for m in machines)
        decode_s = sum(m.device.decode_s for m in machines)
        elapsed, power = max(simulation.elapsed_s, 1e-9) * len(machines), pool.profile.power
        rows.append(
            {
                "role": pool.role,
                "count": pool.count,
                "profile": pool.profile.name,
                "busy": sum(m.device.busy_seconds for m in machines) / elapsed,
                "busy_prefill": prefill_s / elapsed,
                "busy_decode": decode_s / elapsed,
                "steps_per_s": sum(m.device.num_steps for m in machines) / elapsed,
                "link_bytes_per_s": sum(m.num_bytes_out for m in machines) / elapsed,
                "energy_wh": power.joules(elapsed, prefill_s, decode_s) / 3600 if power else None,
            }
        )
    return rows


def outside(simulation: Simulation) -> dict[str, float]:
    """Shares of a profile's steps that were extrapolated, by quantity."""
    return {
        f"{clock.profile.name}: {what}": number / clock.num_steps
        for clock in simulation.clocks
        for what, number in sorted(clock.num_outside.items())
    }


def print_report(simulation: Simulation, console: Console) -> None:
    tallies = simulation.tallies
    console.print(latency_table(tallies.percentiles()))
    console.print(_explained(tallies), "", highlight=False, sep="\n")
    numbers = ("workers", "busy", "with prompts", "decode only", "steps/s", "GB/s")
    table = figures_table("pool", *numbers)
    for row in pools(simulation):
        shares = (f"{row[name]:.0%}" for name in ("busy", "busy_prefill", "busy_decode"))
        rates = f"{row['steps_per_s']:.1f}", f"{row['link_bytes_per_s'] / 1e9:.2f}"
        table.add_row(str(row["role"]), str(row["count"]), *shares, *rates)
    console.print(table)
    console.print(
        "; ".join(f"{row['role']} workers: {row['profile']}" for row in pools(simulation)), highlight=False
    )
    result = summary(simulation)
    ended = ", ".join(f"{count:,} {outcome}" for outcome, count in result["requests"].items())
    console.print(
        f"{ended} in {result['simulated_s']:.1f} s; {result['cached_share']:.1%} of the prompt tokens "
        "came from a prefix cache"
    )
    if result["killed"]:
        console.print(
            f"{result['killed']:,} times a worker died and started again; {result['redispatched']:,} "
            "dispatches were made anew"
        )
    for level in result["levels"]:
        kept = "kept" if level["met"] >= level["share"] else "[yellow]missed[/yellow]"
        console.print(f"{level['bound']}: {kept}, met by {level['met']:.2%}", highlight=False)
    if result["slo"] and not result["levels"]:
        console.print(
            f"{result['slo']}: met by {result['attainment']:.2%} of the requests{_rates(result)}",
            highlight=False,
        )
    for what, share in result["steps_outside_the_profile"].items():
        console.print(f"[yellow]extrapolated: {what} in {share:.2%} of the steps[/yellow]")


def _rates(result: dict[str, Any]) -> str:
    if result["goodput_per_s"] is None:
        return ""
    return f": {result['goodput_per_s']:.2f} good requests/s while {result['offered_per_s']:.2f}/s arrived"


def latency_table(percentiles: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of ``Tallies.percentiles``."""
    table = figures_table("ms", "mean", "p50", "p90", "p99", "max")
    for name, values in percentiles.items():
        table.add_row(name, *(f"{1e3 * v:,.1f}" for v in values.values()))
    return table


def _explained(tallies: Tallies) -> str:
    return "\n".join(f"{name}: {EXPLAINED[name]}" for name in tallies.percentiles() if name in EXPLAINED)
