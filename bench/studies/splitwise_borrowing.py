"""The product's own simulator on splitwise-sim's traces, designs and step times, with and without borrowing,
beside the imitation of splitwise-sim (which gives its published results: validate_splitwise.py).

    python -m splitserve.bench.studies.splitwise_borrowing --data ../shared/data/splitwise-sim \\
        --design Splitwise-HH --workload conv --rates 120 130 140 --seconds 30 --json out.json

Each trace is cut after ``--seconds``; all three serve the same requests. TBT is splitwise-sim's:
(E2E - TTFT) / output tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any, Literal

from ...engine.latency_profile import Profile
from ...planner.profile.published import import_published
from ...planner.simulator.cluster import Cluster, Pool
from ...planner.simulator.records import RequestRecord
from ...planner.simulator.simulation import Simulation
from ...traces.operators import cut
from ...traces.readers import open_trace
from ...traces.request import Trace
from ..environment import environment, option_parser, write_record
from .live_errors import percentiles
from .splitwise_cluster import DESIGNS, Imitation, of_jobs
from .splitwise_machine import Job
from .splitwise_slo import NineSlos, splitwise_curves

MODEL = "bloom-176b"
MACHINES = {
    "Splitwise-HH": {"conv": (25, 15), "code": (35, 5)},
    "Splitwise-HA": {"conv": (25, 26), "code": (35, 8)},
    "Splitwise-HHcap": {"conv": (25, 21), "code": (35, 7)},
    "Splitwise-AA": {"conv": (45, 25), "code": (55, 15)},
    "Baseline-A100": {"conv": (70, 0), "code": (70, 0)},
    "Baseline-H100": {"conv": (40, 0), "code": (40, 0)},
}
"""Prompt and token machines of the published runs; the baselines' do both."""
PUBLISHED = {
    "Splitwise-HH": {"conv": 120, "code": 90},
    "Splitwise-HA": {"conv": 140, "code": 90},
    "Splitwise-HHcap": {"conv": 140, "code": 100},
    "Splitwise-AA": {"conv": 110, "code": 70},
    "Baseline-A100": {"conv": 50, "code": 40},
    "Baseline-H100": {"conv": 120, "code": 50},
}
"""The highest of the traces' rates at which splitwise-sim holds all nine service levels, BLOOM-176B."""
Workload = Literal["conv", "code"]


def profile_of(perf_model: Path, hardware: str) -> Profile:
    """Return the imported profile with splitwise-sim's own reading of the step times in it."""
    prefill, decode = splitwise_curves(perf_model, MODEL, hardware, 8)
    imported = import_published(perf_model, MODEL, hardware, 8)
    return imported.model_copy(update={"prefill": prefill, "decode": decode})


def simulated(
    data: Path, design: str, workload: Workload, trace: Trace, borrow: bool
) -> tuple[list[Job], dict[str, float]]:
    """Return each request's times, and the coordinator's counters."""
    prompt, token = (profile_of(data / "perf_model.csv", hardware) for hardware in DESIGNS[design])
    num_prompt, num_token = MACHINES[design][workload]
    batch: dict[str, Any] = {"max_batch_tokens": 2048, "max_num_seqs": 512}
    if design.startswith("Baseline"):
        pools: tuple[Pool, ...] = (Pool(role="colocated", count=num_prompt, profile=prompt, **batch),)
    else:
        pools = (
            Pool(role="prefill", count=num_prompt, profile=prompt, borrow=borrow, **batch),
            Pool(role="decode", count=num_token, profile=token, borrow=borrow, **batch),
        )
    records: list[RequestRecord] = []
    simulation = Simulation(
        Cluster(pools=pools, max_queue=1 << 30, coordinator_s=0.0), on_record=records.append
    )
    simulation.run(trace)
    jobs = [
        Job(r.number, r.arrival_s, r.num_prompt_tokens, r.num_received, ttft=r.ttft_s, e2e=r.e2e_s)
        for r in records
        if r.finished
    ]
    return jobs, simulation.coordinator.core.counters()


def compare(arguments: argparse.Namespace, rate: int) -> dict[str, Any]:
    """Return percentiles, and which service levels are missed, of the imitation and of both simulations."""
    data, design, workload = arguments.data, arguments.design, arguments.workload
    name = f"rr_{workload}_{rate}_2min"
    trace = cut(open_trace(data / "traces" / f"{name}.csv.gz"), 0.0, arguments.seconds)
    num_requests, levels = sum(1 for _ in trace), NineSlos(data / "perf_model.csv", MODEL)
    imitation = Imitation(data / "perf_model.csv", MODEL, design, *MACHINES[design][workload])
    theirs = imitation.run(trace)
    found: dict[str, Any] = {
        "design": design,
        "workload": workload,
        "rate": rate,
        "requests": num_requests,
        "splitwise": percentiles(of_jobs(theirs)),
        "splitwise_missed": levels.missed(theirs, num_requests),
    }
    for borrow in [0] if design.startswith("Baseline") else arguments.borrow:
        began, key = time.process_time(), "borrowing" if borrow else "fixed"
        jobs, counters = simulated(data, design, workload, trace, bool(borrow))
        ours = found[key] = percentiles(of_jobs(jobs))
        ratios = {
            f"{quantity}_{p}": ours[quantity][p] / seconds
            for quantity, of in found["splitwise"].items()
            for p, seconds in of.items()
        }
        found[f"{key}_over_splitwise"] = ratios
        found[f"{key}_missed"] = levels.missed(jobs, num_requests)
        found[f"{key}_borrowed"] = [counters["borrowed_prompts"], counters["borrowed_sequences"]]
        worst = max(ratios, key=ratios.__getitem__)
        print(
            f"{design} {workload} {rate}/s {key}: missed {found[f'{key}_missed'] or 'none'} (theirs "
            f"{found['splitwise_missed'] or 'none'}); worst {worst} {ratios[worst]:.2f} times; borrowed "
            f"{found[f'{key}_borrowed']}; "
            + " ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            + f"; {time.process_time() - began:.0f} s of processor",
            flush=True,
        )
    return found


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--design", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--workload", nargs="+", choices=["conv", "code"], default=["conv", "code"])
    parser.add_argument("--rates", nargs="+", type=int, help="default: around the published highest one")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--borrow", nargs="+", type=int, choices=[0, 1], default=[0, 1])
    arguments = parser.parse_args()
    runs = []
    for design, workload in itertools.product(arguments.design, arguments.workload):
        highest = PUBLISHED[design][workload]
        for rate in arguments.rates or (highest, highest + 10):
            chosen = argparse.Namespace(**{**vars(arguments), "design": design, "workload": workload})
            runs.append(compare(chosen, rate))
            write_record(arguments.json, {"environment": environment(), "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
