"""Does a plan's answer hold on a bursty trace, and what does a plan from means do there?

Plans on the first requests of the trace; then the whole trace, compressed as much, is simulated on the
cluster that the plan recommends and on the one that a plan from means would build, at the rate that each
expects; and the latter under Poisson arrivals of the same requests.

    python -m splitserve.bench.studies.plan_bursts \\
        --trace ../shared/data/azure/AzureLLMInferenceTrace_code.csv \\
        --profile h100.json --gpus 8 \\
        --slo ttft=2@p90,tpot=0.1@p90 --json out.json
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.latency_profile import Profile
from ...planner.search.candidates import Candidate, Hardware, Kind
from ...planner.search.goal import Goal, Limits
from ...planner.search.goodput import Load, Question
from ...planner.search.looks import Look, look
from ...planner.search.plan import Plan
from ...planner.search.plan_json import as_json
from ...planner.search.search import search
from ...planner.simulator.slo import parse_slo
from ...traces.readers import open_trace
from ...traces.request import TraceRequest
from ..environment import environment, option_parser, write_record

NUM_REQUESTS = 10_000
PROCESSES = 2


def cv(requests: Sequence[TraceRequest]) -> float:
    """Coefficient of variation of the times between arrivals."""
    gaps = np.diff([r.arrival_s for r in requests])
    return float(gaps.std() / gaps.mean())


def poisson(requests: Sequence[TraceRequest], seed: int = 0) -> tuple[TraceRequest, ...]:
    """The same requests in their order, at the same mean rate, without memory."""
    draw, mean = random.Random(seed), (requests[-1].arrival_s - requests[0].arrival_s) / (len(requests) - 1)

    def arrivals() -> Iterator[float]:
        at = 0.0
        while True:
            yield at
            at += draw.expovariate(1 / mean)

    return tuple(replace(r, arrival_s=at) for r, at in zip(requests, arrivals(), strict=False))


def checks(plan: Plan, requests: tuple[TraceRequest, ...]) -> dict[str, Any]:
    """The whole trace on both clusters."""
    asked, load = plan.question, plan.question.load
    whole = Question.of(asked.hardware, Load(requests, load.block_size), asked.level)
    calm = Question.of(asked.hardware, Load(poisson(requests), load.block_size), asked.level)
    compression = whole.load.rate / load.rate  # the first requests' mean rate is not the whole trace's
    winner, means = plan.winner, plan.means
    tried: list[tuple[str, Question, tuple[Candidate, float]]] = [
        ("plan, whole trace", whole, (winner.candidate, winner.goodput * compression)),
        ("plan, whole trace, four fifths", whole, (winner.candidate, 0.8 * winner.goodput * compression)),
        ("means, whole trace", whole, (means.candidate, means.expected * compression)),
        ("means, whole trace at the plan's rate", whole, (means.candidate, winner.goodput * compression)),
        ("means, Poisson at four fifths of its rate", calm, (means.candidate, 0.8 * means.expected)),
    ]
    found = {}
    for name, question, one in tried:
        seen = look(question, *one)
        found[name] = {"cluster": asked.hardware.words(one[0]), **_figures(seen)}
        print(
            f"{name}: {found[name]['cluster']} at {seen.rate:.2f} requests/s: {seen.tallies.attainment:.1%} "
            "good",
            flush=True,
        )
    return found


def _figures(seen: Look) -> dict[str, Any]:
    latency = seen.tallies.percentiles()
    return {
        "rate_per_s": seen.rate,
        "attainment": seen.tallies.attainment,
        "ttft_s": latency["ttft"],
        "tpot_s": latency.get("tpot"),
    }


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=8, help="workers of this profile")
    parser.add_argument("--slo", default="ttft=2@p90,tpot=0.1@p90")
    arguments = parser.parse_args()
    trace = open_trace(arguments.trace)
    requests = tuple(islice(trace, NUM_REQUESTS))
    hardware = Hardware((Kind.of(Profile.read(arguments.profile)),))
    question = Question.of(hardware, Load(requests, trace.block_size), parse_slo(arguments.slo))
    began = time.monotonic()
    plan = search(question, Goal("goodput", Limits(arguments.gpus)), PROCESSES)
    took = time.monotonic() - began
    planned = as_json(plan)
    print(
        "\n".join(
            [
                *planned["recommendation"],
                f"Planned in {took:.0f} s. The trace's gaps have a CV of {cv(requests):.1f}.",
                "",
            ]
        )
    )
    found = checks(plan, requests)
    record = {
        "environment": environment(),
        "planned_in_s": took,
        "cv_of_gaps": cv(requests),
        "plan": planned,
        "checks": found,
    }
    write_record(arguments.json, record)
    held = found["plan, whole trace, four fifths"]["attainment"] >= question.level.attainment
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
