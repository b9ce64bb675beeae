"""``splitserve plan``: how many prefill and how many decode workers, for a trace and bounds on latency."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean

from rich.console import Console

from ..engine.latency_profile import Profile
from ..traces.console import result_console, write_json, writing
from ..traces.readers import open_trace
from ..traces.request import TraceRequest
from .errors import SimulationError
from .search.candidates import Hardware, Kind
from .search.crew import Stopped
from .search.demand import good_alone
from .search.goal import Goal, Limits, settings_of, shapes
from .search.goodput import PRECISION, Load, Question, sketch, sketched_goodput
from .search.hardware_file import of_inventory, read_hardware, stocks_of
from .search.launch import write_launch
from .search.plan import LIVES_TO_FILL, Plan
from .search.plan_json import as_json
from .search.search import search
from .search.tables import clusters_table, pareto_table, rates_table
from .search.words import answer, remarks
from .settings import PlanSettings
from .simulator.cluster import alone_on_their_hosts
from .simulator.slo import parse_slo

MOST_CHECKED = 50_000
FEWEST_PLANNED = 500
MOST_PLANNED = 4_000
"""Requests to plan on where their number is not given."""


def plan(settings: PlanSettings) -> Plan | None:
    """Plan for one model and print it. None: stopped; raises PlannerError, TraceError and EngineError."""
    began = time.monotonic()
    console = result_console()
    hardware = the_hardware(settings)
    question = Question.of(hardware, the_load(settings), parse_slo(settings.slo), settings.seed)
    require_reachable(question, max(settings.chunks))
    goal = the_goal(settings, question)
    if settings.requests is None:
        question = with_enough(question, goal)
    if warning := alone_on_their_hosts(settings.workers_per_host, (kind.profile for kind in hardware.kinds)):
        console.print(f"[yellow]{warning}[/yellow]", highlight=False)
    try:
        with console.status("bounds") as status:
            curves = settings.plot_file is not None
            found = search(question, goal, num_processes(settings), status.update, with_curves=curves)
    except Stopped as stopped:
        console.print(str(stopped), highlight=False)
        return None
    found.warnings += beyond(settings.trace, found)
    for line in answer(found):
        console.print(line, highlight=False)
    if found.winner.goodput > 0:
        for table in filter(None, (rates_table(found), clusters_table(found), pareto_table(found))):
            console.print("", table, sep="\n")
        console.print()
        for line in remarks(found):
            console.print(line, highlight=False)
    console.print(f"Took {time.monotonic() - began:.0f} s.", highlight=False)
    if settings.json_file is not None:
        write_json(settings.json_file, as_json(found), SimulationError)
    if settings.plot_file is not None:
        from .search.plots import draw_plan

        with writing(settings.plot_file, SimulationError):
            draw_plan(settings.plot_file, found)
    if settings.launch_file is not None and found.winner.goodput > 0:
        launch(settings.launch_file, found, console)
    return found


def num_processes(settings: PlanSettings) -> int:
    return settings.jobs or os.cpu_count() or 1


def launch(path: Path, found: Plan, console: Console) -> None:
    """The recommended cluster's configuration: colocated workers are started as mixed ones."""
    hardware, winner, bounds = found.question.hardware, found.winner, found.question.level.bounds.words()
    comment = (
        f"splitserve plan: {hardware.words(winner.candidate)}, for {found.served:.2f} requests/s "
        f"with {bounds}"
    )
    write_launch(path, hardware, winner.candidate, ". ".join([comment, *found.warnings]))
    chart = path.name.endswith("values.yaml")
    start = f"helm install -f {path} ..." if chart else f"splitserve up --config {path} --model ..."
    console.print(f"wrote the configuration to {path}: {start}", highlight=False)


def the_hardware(settings: PlanSettings) -> Hardware:
    if settings.hardware is not None:
        return replace(read_hardware(settings.hardware), workers_per_host=settings.workers_per_host)
    assert settings.profile is not None, "one of the two is given"
    if settings.inventory is not None:
        found = of_inventory(str(settings.profile), settings.inventory)
        return replace(found, workers_per_host=settings.workers_per_host)
    profiles = [Profile.read(Path(name)) for name in str(settings.profile).split(",")]
    kinds = tuple(Kind.of(profile, settings.gpus_per_worker or profile.gpus) for profile in profiles)
    return Hardware(kinds, settings.workers_per_host)


def the_load(settings: PlanSettings) -> Load:
    """The first requests of the trace: as many as are asked for, or all that may be needed. The rows that are
    checked after the search are read, too: a wrong one is an error now."""
    trace, num = open_trace(settings.trace), settings.requests or MOST_PLANNED
    requests = tuple(islice(trace, max(num, MOST_CHECKED)))[:num]
    if len(requests) < 20 or requests[0].arrival_s == requests[-1].arrival_s:
        few = (
            "a plan needs at least 20" if len(requests) < 20 else "all at one time, so that they have no rate"
        )
        raise SimulationError(f"{settings.trace} has {len(requests)} requests: {few}")
    return Load(requests, trace.block_size)


def the_goal(settings: PlanSettings, question: Question) -> Goal:
    """Raises SimulationError where prices or watts are needed and not known."""
    stocks = stocks_of(settings.inventory or "")
    gpus = settings.gpus or sum(num for _, num in stocks)
    limits = Limits(gpus, settings.max_price_per_hour, settings.max_watts, stocks)
    kinds = question.hardware.kinds
    needs_price = settings.objective == "cost" or limits.price_per_hour
    needs_power = settings.objective == "energy" or limits.watts
    unpriced = [k.name for k in kinds if needs_price and k.price_per_hour is None]
    unmetered = [k.name for k in kinds if needs_power and k.power is None]
    for what, names in (("price_per_hour", unpriced), ("power", unmetered)):
        if names:
            where = "write it into the profile, into the file of --hardware, or as --inventory 8xh100:2.5"
            raise SimulationError(f"the {what} of {', '.join(names)} is not known: {where}")
    return Goal(settings.objective, limits, settings.rate or question.load.rate, settings.chunks)


def with_enough(question: Question, goal: Goal) -> Question:
    """The question for the first requests, whose number is doubled until the cluster fills in that time and
    the sketched goodput settles, which is to change by less than PRECISION.

    The goodput is of the cluster that means favour."""
    all_shapes = shapes(question.hardware, goal.limits)
    chosen = [one for shape in all_shapes for one in settings_of(question, goal, shape)]
    candidate = max(chosen, key=question.bound, default=None)
    num, before = FEWEST_PLANNED, 0.0
    while candidate is not None and num < len(question.load.requests):
        load = replace(question.load, requests=question.load.requests[:num])
        part = Question.of(question.hardware, load, question.level, question.seed)
        goodput = sketched_goodput(part, candidate)
        if abs(goodput - before) <= PRECISION * goodput:
            lives_s = sketch(part, candidate, goodput, give_up=False).e2e_s if goodput else [0.0]
            if num > LIVES_TO_FILL * goodput * mean(lives_s):
                return part
        before, num = goodput, 2 * num
    return question


def require_reachable(question: Question, max_batch_tokens: int) -> None:
    """Raises SimulationError where too many requests could not be good even if each had the cluster to
    itself."""
    requests, bounds = question.load.requests, question.level.bounds
    missed = [
        sum(not good_alone(r, question.hardware, max_batch_tokens, part) for r in requests)
        for part in bounds.parts
    ]
    share = max(0.0, 1 - bounds.failed(missed) / len(requests))
    if share < question.level.attainment:
        raise SimulationError(
            f"only {share:.1%} of the requests could meet {bounds.words()} if each had the cluster to "
            f"itself (the longest prompt has {max(r.num_prompt_tokens for r in requests):,} tokens; the "
            f"profile's model takes {question.hardware.longest:,}): loosen the bounds, or profile quicker "
            "hardware"
        )


def beyond(path: Path, found: Plan) -> Iterable[str]:
    """Return a warning where the sketch finds the rest of the trace harder than the planned part, and note
    what the winner serves over all of it."""
    planned, winner = found.question, found.winner
    trace = open_trace(path)
    requests: tuple[TraceRequest, ...] = tuple(islice(trace, MOST_CHECKED))
    if len(requests) <= len(planned.load.requests) or winner.goodput <= 0:
        return
    whole = Question.of(planned.hardware, Load(requests, trace.block_size), planned.level)
    rate = winner.goodput * whole.load.rate / planned.load.rate
    attainment = sketch(whole, winner.candidate, rate, give_up=False).attainment
    if attainment < planned.level.attainment - 0.01:
        found.whole = len(requests), sketched_goodput(whole, winner.candidate)
        yield (
            f"Over {len(requests):,} requests of the trace, at the same compression, only about "
            f"{attainment:.1%} would be good: {_why(found)}. Plan on more (--requests)."
        )


def _why(found: Plan) -> str:
    """Why the rest of the trace is harder than its beginning."""
    if found.winner.at_bound or found.sustained is not None:
        return "so few requests are over before the cluster has filled"
    return f"the first {len(found.question.load.requests):,} are the easier ones"
