"""How fast the simulator is: simulated requests a second of processor time on one core, and whether its
memory stays flat.

Workers with made-up times of about a 70B model's on an 8-GPU machine; arrivals at a rate that keeps the pools
busy: Poisson, with lengths of the Azure conversation trace's medians and spreads, or a trace's own,
compressed. Measured from the first arrival to the last end.

    python -m splitserve.bench.studies.simulator_speed --json out.json
    python -m splitserve.bench.studies.simulator_speed --workers 1000 --requests 1000000 --sketch alone \\
        --json out.json
    python -m splitserve.bench.studies.simulator_speed --workers 100 \\
        --trace ../shared/data/azure/AzureLLMInferenceTrace_conv.csv \\
        --json out.json
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from ...engine.latency_profile import HandoffModel, Memory, Piece, Profile, StepModel
from ...planner.simulator.cluster import Cluster, Pool
from ...planner.simulator.simulation import Simulation
from ...planner.simulator.slo import Slo
from ...planner.sketched_cluster import sketch_summary, sketched
from ...traces.operators import cut, mean_rate, scaled
from ...traces.readers import open_trace
from ...traces.request import Trace
from ...traces.workload.arrivals import Arrivals
from ...traces.workload.lengths import MarginalLengths
from ...traces.workload.workload import Workload
from ..environment import environment, option_parser, write_record

PROFILE = Profile(
    name="about 70B",
    memory=Memory(
        block_size=64, num_blocks=26_000, block_bytes=20 << 20, num_layers=80, max_model_len=16_384
    ),
    prefill=StepModel(pieces=(Piece(curve=((0, 0.03), (512, 0.054), (2048, 0.134), (8192, 0.53))),)),
    decode=StepModel(pieces=(Piece(curve=((0, 0.03), (64, 0.044), (512, 0.15)), read_s=1.8e-7),)),
    handoff=HandoffModel(bytes_per_s=2e11, check_bytes_per_s=2e12),  # checked where they arrive, on GPUs
)
LENGTHS = {
    "conversation": MarginalLengths(prompt="lognormal:1020,0.7", output="lognormal:129,0.9"),
    "code": MarginalLengths(prompt="lognormal:1469,0.8", output="lognormal:13,1"),
}
PER_WORKER = {"conversation": 4.0, "code": 4.5}
"""Requests a second for each worker of the cluster, near its limit."""
SHARE_OF_PREFILL = {"conversation": 0.35, "code": 0.8}


def synthetic(kind: str, num_workers: int, num_requests: int) -> Trace:
    arrivals = Arrivals(rate=PER_WORKER[kind] * num_workers)
    return Workload(arrivals=arrivals, lengths=LENGTHS[kind], sessions=None).trace(
        0, max_requests=num_requests
    )


def compressed(path: Path, num_workers: int, num_requests: int) -> Trace:
    """A trace's first requests, at the rate of the conversation load."""
    trace = cut(open_trace(path), max_requests=num_requests)
    return scaled(trace, PER_WORKER["conversation"] * num_workers / mean_rate(trace))


def cluster_of(kind: str, num_workers: int) -> Cluster:
    """In the proportion that this load asks for."""
    prefill = round(num_workers * SHARE_OF_PREFILL[kind])
    pools = (
        Pool(role="prefill", count=prefill, profile=PROFILE, max_batch_tokens=2048),
        Pool(role="decode", count=num_workers - prefill, profile=PROFILE, max_num_seqs=256),
    )
    return Cluster(pools=pools, max_queue=1 << 30)


def measure(kind: str, num_workers: int, trace: Trace) -> dict[str, Any]:
    """One cluster under one load."""
    simulation = Simulation(cluster_of(kind, num_workers))
    began = time.process_time()
    tallies = simulation.run(trace)
    took = time.process_time() - began
    return {
        "workers": num_workers,
        "requests": tallies.num_requests,
        "finished": tallies.outcomes["finished"],
        "requests_per_cpu_s": tallies.num_requests / took,
        "tokens_per_cpu_s": tallies.num_output_tokens / took,
        "events_per_cpu_s": simulation.queue.num_events / took,
        "simulated_s": simulation.elapsed_s,
        "busy": [
            m.device.busy_seconds / simulation.elapsed_s
            for m in (simulation.machines[0], simulation.machines[-1])
        ],
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "latency_s": tallies.percentiles(),
    }


def measure_sketch(
    kind: str, num_workers: int, trace: Trace, simulated: dict[str, Any] | None
) -> dict[str, Any]:
    """The same sketched: how much faster, and how far from the simulated percentiles, if these are given."""
    cluster, bounds = cluster_of(kind, num_workers), Slo()
    began = time.process_time()
    found = sketched(cluster, trace, bounds)
    took = time.process_time() - began
    latency = sketch_summary(found, cluster, trace, bounds)["latency_s"]
    seen: dict[str, Any] = {
        "workers": num_workers,
        "requests": found.num_ended,
        "refused": found.num_refused,
        "cpu_s": took,
    }
    seen |= {"requests_per_cpu_s": found.num_ended / took, "simulated_s": found.elapsed_s}
    seen |= {"peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if simulated is not None:
        seen["off"] = {
            name: {p: one[p] / simulated["latency_s"][name][p] - 1 for p in ("p50", "p90", "p99")}
            for name, one in latency.items()
        }
    return {**seen, "latency_s": latency}


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 100])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--loads", nargs="+", choices=sorted(LENGTHS), default=sorted(LENGTHS, reverse=True))
    parser.add_argument("--trace", type=Path, help="in place of the made-up loads")
    parser.add_argument(
        "--sketch", nargs="?", const="too", choices=("too", "alone"), help="sketch each load, too or alone"
    )
    arguments = parser.parse_args()
    kinds = ["conversation"] if arguments.trace else arguments.loads
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for kind in kinds:
        for num_workers in arguments.workers:
            counts = num_workers, arguments.requests
            trace = compressed(arguments.trace, *counts) if arguments.trace else synthetic(kind, *counts)
            if arguments.sketch == "alone":
                found = measure_sketch(kind, num_workers, trace, None)
            else:
                found = measure(kind, num_workers, trace)
                if arguments.sketch:
                    found["sketched"] = measure_sketch(kind, num_workers, trace, found)
            print(kind, json.dumps(found, indent=1), flush=True)
            results[kind].append(found)
    write_record(arguments.json, {"environment": environment(), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
