"""``splitserve plan``: how many prefill and how many decode workers, for a trace and bounds on latency."""

from __future__ import annotations

import os
import time
from itertools import islice

import orjson
from rich.console import Console

from ..engine.latency_profile import Profile
from .errors import SimulationError
from .search.candidates import Hardware, good_alone
from .search.goodput import Load, Question
from .search.launch import write_launch
from .search.plan import search
from .search.words import as_json, sentences
from .settings import PlanSettings
from .simulator.report import slo_words
from .slo import parse_slo
from .trace.readers import open_trace


def plan(settings: PlanSettings) -> int:
    """The command. Returns its exit status; raises PlannerError and EngineError."""
    began = time.monotonic()
    console = Console()
    prefill = Profile.read(settings.profile)
    hardware = Hardware(prefill, Profile.read(settings.decode_profile) if settings.decode_profile else prefill)
    question = Question.of(hardware, the_load(settings), parse_slo(settings.slo), settings.seed)
    num_workers = settings.gpus // settings.gpus_per_worker
    if num_workers < 2:
        raise SimulationError(f"{settings.gpus} GPUs are {num_workers} workers of {settings.gpus_per_worker}: a split needs two")
    require_reachable(question, max(settings.chunks))
    with console.status("bounds") as status:
        found = search(question, num_workers, settings.chunks, settings.jobs or os.cpu_count() or 1, status.update)
    for line in sentences(found):
        console.print(line, highlight=False)
    console.print(f"Took {time.monotonic() - began:.0f} s.", highlight=False)
    if settings.json_file is not None:
        settings.json_file.write_bytes(orjson.dumps(as_json(found), option=orjson.OPT_INDENT_2) + b"\n")
    if settings.plot_file is not None:
        from .search.plots import draw_plan

        draw_plan(settings.plot_file, found)
    if settings.launch_file is not None:
        winner = found.best if found.disaggregates else found.colocated
        write_launch(settings.launch_file, winner.candidate)
        console.print(f"wrote {settings.launch_file}: splitserve up --config {settings.launch_file} --model ...", highlight=False)
    return 0


def the_load(settings: PlanSettings) -> Load:
    """The first requests of the trace."""
    trace = open_trace(settings.trace)
    requests = tuple(islice(trace, settings.requests))
    if len(requests) < 20:
        raise SimulationError(f"{settings.trace} has {len(requests)} requests: too few to plan on")
    return Load(requests, trace.block_size)


def require_reachable(question: Question, max_batch_tokens: int) -> None:
    """Raises SimulationError where too many requests could not be good even if each had the cluster to itself."""
    requests, bounds = question.load.requests, question.level.bounds
    share = sum(good_alone(r, question.hardware, max_batch_tokens, bounds) for r in requests) / len(requests)
    if share < question.level.attainment:
        raise SimulationError(
            f"only {share:.1%} of the requests could meet {slo_words(bounds)} if each had the cluster to itself (the longest prompt has "
            f"{max(r.num_prompt_tokens for r in requests):,} tokens; the profile's model takes "
            f"{question.hardware.prefill.memory.max_model_len:,}): loosen the bounds, or profile quicker hardware"
        )
