"""Time and result of a plan for 16 workers on two cores, for both Azure traces, with a shipped profile. The
conversation trace is planned twice: with the default number of requests, and with enough to fill the cluster,
which decides whether to disaggregate and takes more than a minute.

    python -m splitserve.bench.studies.plan_sixteen --data ../shared/data/azure \\
        --json bench/results/plan_sixteen.json --plots docs

The exit status is 1 where one of the shorter plans takes longer than a minute, or the longer one's load is
over too soon all the same.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from ...engine.latency_profile import Profile
from ...planner.search.candidates import Hardware, Kind
from ...planner.search.goal import Goal, Limits
from ...planner.search.goodput import Load, Question
from ...planner.search.plan import Plan
from ...planner.search.plan_json import as_json
from ...planner.search.plots import draw_plan
from ...planner.search.search import search
from ...planner.simulator.slo import parse_slo
from ...traces.readers import open_trace
from ..environment import environment, option_parser, write_record

PROFILE = Path("llama2-70b-h100x8")
NUM_WORKERS, PROCESSES = 16, 2
ALLOWED_S = 60.0
SLO = "ttft=0.5@p90,tpot=0.05@p90"
CASES = {  # number of requests
    "conversation": ("AzureLLMInferenceTrace_conv.csv", 1000),
    "code": ("AzureLLMInferenceTrace_code.csv", 600),
    "conversation-lasting": ("AzureLLMInferenceTrace_conv.csv", 2500),
}
LASTING = {"conversation-lasting"}


def planned(path: Path, num_requests: int) -> tuple[Plan, float]:
    """With everything that the plots need; and the seconds it took."""
    began = time.monotonic()
    trace = open_trace(path)
    load = Load(tuple(islice(trace, num_requests)), trace.block_size)
    hardware = Hardware((Kind.of(Profile.read(PROFILE)),))
    question = Question.of(hardware, load, parse_slo(SLO))
    plan = search(question, Goal("goodput", Limits(NUM_WORKERS)), PROCESSES, with_curves=True)
    return plan, time.monotonic() - began


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with the Azure traces of 2023")
    parser.add_argument("--plots", type=Path, help="folder for plan-code.png and the like")
    arguments = parser.parse_args()
    machine, found, missed = environment(), {}, False
    for name, (file, num_requests) in CASES.items():
        plan, took = planned(arguments.data / file, num_requests)
        missed |= plan.is_short(plan.winner) if name in LASTING else took > ALLOWED_S
        described: dict[str, Any] = as_json(plan)
        found[name] = {
            "requests": num_requests,
            "planned_in_s": took,
            "simulated_requests": plan.num_simulated,
            **described,
        }
        print("\n".join([f"--- {name}: planned in {took:.1f} s", *described["recommendation"]]), flush=True)
        if arguments.plots:
            draw_plan(arguments.plots / f"plan-{name}.png", plan)
    write_record(arguments.json, {"environment": machine, "slo": SLO, "plans": found})
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
