"""Is the simulator right? Real processes under a workload, and the same cluster simulated under the same
requests.

With ``--runner paced`` (default) the workers take profiled times and compute nothing; with ``--runner model``
they run the model that was profiled. First come single requests on the idle cluster. Only they set
``coordinator_s``, the loop around a decode step and the time of a join on *this* machine. Then the workloads:
percentiles of TTFT, TPOT and E2E, live against simulated. The exit status is 1 where one is off by more than
5% (a model: 10%, its p99 15%). A load generator is never on time to the millisecond, and the order of
arrivals decides which requests share a step: so each missed percentile is shown with its range for arrivals
up to 2 ms late, drawn eight times. With a model the workers log their steps, and a second simulation gets the
machine's speed in every two seconds of the live run (live_pace.py): that separates the machine's part of the
error from the simulator's.

    python -m splitserve.bench.studies.validate_live --clusters 2P2D 4P4D 6P2D 12P12D 1M --seconds 90 \\
        --traces AzureLLMInferenceTrace_conv.csv AzureLLMInferenceTrace_code.csv --json out.json
    python -m splitserve.bench.studies.validate_live --runner model --model M --dtype float32 \\
        --profile P.json \\
        --clusters 1P1D 1M --json out.json

A cluster is named by its prefill, decode and mixed workers: 6P2D, 1M, 1P2M.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...cli.settings import DEMO_MODEL
from ...engine.latency_profile import Memory, Piece, Profile, StepModel
from ...loadgen.load import generate_load
from ...loadgen.settings import LoadSettings
from ...planner.profile.handoff import measure_movers
from ...planner.simulator.cluster import Cluster, Pool, PoolRole
from ...traces.own_format import write_trace
from ...traces.readers import open_trace
from ...traces.request import Trace, TraceRequest
from ..environment import environment, option_parser, write_record
from ..handoff.live_pace import LivePace, processor_times, read_step_logs, stolen_share
from ..live_cluster import live_cluster, words
from .live_errors import LATE_S, Replay, compared, medians, of_records, of_samples, show, simulated
from .live_workloads import WORKLOADS, limited

BOUNDS = {"paced": {"p50": 0.05, "p90": 0.05, "p99": 0.05}, "model": {"p50": 0.1, "p90": 0.1, "p99": 0.15}}
"""Allowed errors of percentiles: a profile is itself measured."""
PACED = Profile(
    name="paced default",
    memory=Memory(block_size=16, num_blocks=4096, block_bytes=1 << 14, num_layers=16, max_model_len=2048),
    prefill=StepModel(pieces=(Piece(curve=((0, 0.02), (512, 0.08)), read_s=5e-8),)),
    decode=StepModel(pieces=(Piece(curve=((0, 0.03), (64, 0.06)), read_s=3e-7),)),
)
STEPS = "steps"
"""The folder of the workers' logs."""
ALONE = ((64, 1), (64, 33), (400, 2))
"""Single requests for the calibration: prompt and output tokens."""


def main() -> int:
    arguments = parsed()
    found, machine = {}, environment()
    for name, counts in arguments.clusters.items():
        print(f"--- {name}", flush=True)
        arguments.prefill, arguments.decode, arguments.mixed = counts
        found[name] = validated(arguments)
        misses, own_misses = list(missed(found, "error")), list(missed(found, "error_at_its_pace"))
        record = {
            "environment": machine,
            "clusters": found,
            "missed": misses,
            "missed_at_its_pace": own_misses,
        }
        write_record(arguments.json, record)
    print("\n".join(misses) or "every percentile agrees", flush=True)
    if arguments.runner == "model":
        print(
            "told how fast the machine was:",
            *(own_misses or ["every percentile agrees"]),
            sep="\n",
            flush=True,
        )
    return int(bool(misses))


def missed(found: dict[str, Any], which: str) -> Iterator[str]:
    """A line for each percentile that is further off than allowed."""
    for cluster, one in found.items():
        for workload, result in one["workloads"].items():
            for name, errors in result.get(which, {}).items():
                for percentile, error in errors.items():
                    if abs(error) > (allowed := one["bounds"][percentile]):
                        low, high = result["error_when_late"][name][percentile]
                        text = f"{low:+.1%} to {high:+.1%} with arrivals up to {1e3 * LATE_S:.0f} ms late"
                        yield (
                            f"{cluster}, {workload}: {name} {percentile} is off by {error:+.1%} "
                            f"({text}), {allowed:.0%} are allowed"
                        )


def validated(arguments: argparse.Namespace) -> dict[str, Any]:
    """One cluster: live, calibrated by requests that are alone, and simulated."""
    profile = Profile.read(arguments.profile) if arguments.profile else PACED
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        traces = {w: limited(arguments, profile, w, folder) for w in arguments.workloads}
        url = stack.enter_context(live_cluster(command_line(arguments, profile, folder), folder / "log"))
        seeds = itertools.count()
        profile, coordinator_s = calibrated(url, arguments, profile, folder, seeds)
        cluster = simulated_cluster(arguments, profile, coordinator_s)
        results = {}
        for workload, path in traces.items():
            before = processor_times()
            runs = [asyncio.run(replayed(url, path, next(seeds))) for _ in range(arguments.repeats)]
            stolen = stolen_share(before, processor_times())
            results[workload] = {
                "stolen": stolen,
                **compared(runs, cluster, path, paces(arguments, profile, folder, runs)),
            }
            show(workload, results[workload])
    constants = {
        "coordinator_s": coordinator_s,
        "loop_s": profile.decode_loop_s,
        "join_s": profile.handoff.join_s,
    }
    record = {
        "bounds": BOUNDS[arguments.runner],
        "profile": profile.model_dump(mode="json", exclude_none=True),
    }
    return {**constants, **record, "workloads": results}


def parsed() -> argparse.Namespace:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--runner", choices=["paced", "model"], default="paced")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument(
        "--dtype", default="auto", help="of the model's weights and KV cache: the one that was profiled"
    )
    parser.add_argument(
        "--profile", type=Path, help="of the model; default with paced workers: one made up here"
    )
    parser.add_argument(
        "--clusters", nargs="+", default=["2P2D"], help="workers of each, such as 6P2D, or 1M: a mixed one"
    )
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument(
        "--traces", type=Path, nargs="+", help="traces in place of the workloads, scaled to the rate"
    )
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--requests", type=int, default=300, help="of each workload, at least")
    parser.add_argument("--seconds", type=float, default=0, help="and so many that a workload lasts so long")
    parser.add_argument(
        "--load", type=float, default=0.7, help="share of what the busier pool could bear; sets the rate"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="live runs of each workload, of whose percentiles the medians count",
    )
    arguments = parser.parse_args()
    if arguments.runner == "model" and arguments.profile is None:
        parser.error("--runner model needs the --profile of that model on this machine")
    split = {name: re.fullmatch(r"(?:(\d+)P)?(?:(\d+)D)?(?:(\d+)M)?", name) for name in arguments.clusters}
    if wrong := [name for name, found in split.items() if not name or found is None]:
        parser.error(f"--clusters: {wrong[0]!r} is not of the form 6P2D, 1M or 1P2M")
    arguments.clusters = {
        name: tuple(int(count or 0) for count in found.groups()) for name, found in split.items() if found
    }
    if arguments.traces:
        arguments.workloads = [path.name for path in arguments.traces]
    return arguments


def command_line(arguments: argparse.Namespace, profile: Profile, folder: Path) -> list[str]:
    """Options of ``splitserve up``."""
    profile.write(folder / "paced.json")
    measured = arguments.runner == "model"
    return words(
        model=arguments.model,
        prefill=arguments.prefill,
        decode=arguments.decode,
        mixed=arguments.mixed,
        dtype=arguments.dtype,
        max_model_len=profile.memory.max_model_len,
        decode_max_num_seqs=arguments.max_num_seqs,
        prefill_max_batch_tokens=arguments.max_batch_tokens,
        num_blocks=profile.memory.num_blocks,
        step_log=folder / STEPS if measured else None,
        runner=None if measured else f"paced:{folder / 'paced.json'}",
    )


async def replayed(url: str, path: Path, seed: int) -> Replay:
    """The trace, live. Another seed: other prompts of the same lengths, so that nothing of them is cached
    from an earlier replay."""
    settings = LoadSettings(url=url, trace=path, vocab_size=250, seed=seed, timeout_s=600)
    samples, seconds = await generate_load(settings)
    began = time.monotonic() - seconds
    failed = [sample.error for sample in samples if sample.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first: {failed[0]}")
    return Replay(samples, began)


def paces(
    arguments: argparse.Namespace, profile: Profile, folder: Path, runs: Sequence[Replay]
) -> list[LivePace | None]:
    """How fast the machine was in each of these runs; None where workers are paced."""
    if arguments.runner != "model":
        return [None] * len(runs)
    steps = list(read_step_logs(folder / STEPS))
    return [LivePace(steps, profile, run.began) for run in runs]


def calibrated(
    url: str, arguments: argparse.Namespace, profile: Profile, folder: Path, seeds: Iterator[int]
) -> tuple[Profile, float]:
    """The profile and ``coordinator_s`` that meet the medians of requests that were alone."""
    block_bytes = (
        profile.memory.block_bytes if arguments.runner == "model" else (1 << 26) // profile.memory.num_blocks
    )
    handoff = measure_movers(block_bytes, profile.memory.num_layers)["shm"]
    handoff = handoff.model_copy(
        update={"bytes_per_s": handoff.bytes_per_s * profile.memory.block_bytes / block_bytes}
    )
    profile = profile.model_copy(update={"handoff": handoff, "prefill_loop_s": 0.0, "decode_loop_s": 0.0})
    live, modelled = [], []
    for index, (prompt, output) in enumerate(ALONE):
        requests = [TraceRequest(1.5 * i, prompt, output) for i in range(7)]
        path = folder / f"alone-{index}.jsonl"
        write_trace(path, Trace("alone", lambda requests=requests: iter(requests)))  # type: ignore[misc]
        run = asyncio.run(replayed(url, path, next(seeds)))
        live.append(medians(of_samples(run.samples)))
        (pace,) = paces(arguments, profile, folder, [run])
        modelled.append(
            medians(of_records(simulated(simulated_cluster(arguments, profile, 0.0), open_trace(path), pace)))
        )
    coordinator_s = max(0.0, live[0]["ttft"] - modelled[0]["ttft"])
    first = live[2]["tpot"] - modelled[2]["tpot"]  # its only other token has waited for the join
    loop_s = max(0.0, ((live[1]["tpot"] - modelled[1]["tpot"]) * 32 - first) / 31)
    join_s = max(0.0, handoff.join_s + first - loop_s)
    print(
        f"calibrated: coordinator {1e3 * coordinator_s:.2f} ms, decode loop {1e3 * loop_s:.2f} ms, join "
        f"{1e3 * join_s:.2f} ms",
        flush=True,
    )
    handoff = handoff.model_copy(update={"join_s": join_s})
    return profile.model_copy(
        update={"handoff": handoff, "decode_loop_s": loop_s, "prefill_loop_s": loop_s / 2}
    ), coordinator_s


def simulated_cluster(arguments: argparse.Namespace, profile: Profile, coordinator_s: float) -> Cluster:
    options = {
        "profile": profile,
        "max_num_seqs": arguments.max_num_seqs,
        "max_batch_tokens": arguments.max_batch_tokens,
    }
    counts: dict[PoolRole, int] = {
        "prefill": arguments.prefill,
        "decode": arguments.decode,
        "colocated": arguments.mixed,
    }
    pools = tuple(Pool(role=role, count=count, **options) for role, count in counts.items() if count)
    # paced workers do not slow each other
    on_one_host = sum(counts.values()) if arguments.runner == "model" else 1
    return Cluster(pools=pools, coordinator_s=coordinator_s, workers_per_host=on_one_host)


if __name__ == "__main__":
    sys.exit(main())
