"""Does an imitation of splitwise-sim, on our reading of its measurements, give its published results? And how
much do ours differ?

For every run whose per-request results are there (``results/requests/MODEL__TRACE__DESIGN_P_T.csv.gz``, of
any model that splitwise_cluster.py knows): the imitation's requests beside the published ones, one by one for
the unit cases, and as percentiles. Then, for the runs that split, our own simulator on the same trace,
measurements and numbers of machines, as it really schedules and as the measurements were meant (decode time
by batch and context).

    python -m splitserve.bench.studies.validate_splitwise --data ../shared/data/splitwise-sim --json out.json
"""

from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path
from typing import Any

from ...planner.profile.published import import_published
from ...planner.simulator.cluster import Cluster, Pool
from ...traces.readers import open_trace
from ...traces.request import Trace
from ..environment import environment, option_parser, write_record
from .live_errors import percentiles, simulated
from .splitwise_cluster import DESIGNS, Imitation, of_jobs


def published(path: Path) -> dict[int, dict[str, float]]:
    """By request."""
    with gzip.open(path, "rt", newline="") as file:
        return {
            int(float(row["request_ids"])): {k: float(v) for k, v in row.items()}
            for row in csv.DictReader(file)
        }


def relative(
    ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    return {name: {p: ours[name][p] / theirs[name][p] - 1 for p in theirs[name]} for name in theirs}


def compare(data: Path, path: Path, with_ours: bool) -> dict[str, Any]:
    """One published run."""
    model, trace_name, design = path.name.removesuffix(".csv.gz").split("__")
    name, num_prompt, num_token = design.rsplit("_", 2)
    trace = open_trace(data / "traces" / f"{trace_name}.csv.gz")
    theirs = published(path)
    jobs = Imitation(data / "perf_model.csv", model, name, int(num_prompt), int(num_token)).run(trace)
    known = sorted(theirs)
    reference = percentiles(
        {
            "ttft": [theirs[i]["ttft_times"] for i in known],
            "tbt": [theirs[i]["tbt_times"] for i in known],
            "e2e": [theirs[i]["response_times"] for i in known],
        }
    )
    imitated = percentiles(of_jobs(jobs))
    both = [
        (j, theirs[j.number]) for j in jobs if j.number in theirs
    ]  # where memory runs out, some never end
    by_request = [max(abs(j.ttft - row["ttft_times"]), abs(j.e2e - row["response_times"])) for j, row in both]
    found = {
        "requests": len(known),
        "done": len(jobs),
        "published": reference,
        "imitated": imitated,
        "error": relative(imitated, reference),
    }
    found["worst_difference_of_a_request_s"] = max(by_request)
    if with_ours and name.startswith("Splitwise"):
        found["ours"] = ours = percentiles(
            as_we_schedule(data, model, name, int(num_prompt), int(num_token), trace)
        )
        found["ours_differ"] = relative(ours, reference)
    return found


def as_we_schedule(
    data: Path, model: str, design: str, num_prompt: int, num_token: int, trace: Trace
) -> dict[str, list[float]]:
    """Our simulator on the same machines; TBT as splitwise-sim counts it."""
    prompt, token = (
        import_published(data / "perf_model.csv", model, hardware, 8) for hardware in DESIGNS[design]
    )
    pools = (
        Pool(role="prefill", count=num_prompt, profile=prompt, max_batch_tokens=2048),
        Pool(role="decode", count=num_token, profile=token, max_num_seqs=512),
    )
    cluster = Cluster(pools=pools, max_queue=1 << 30, coordinator_s=0.0)
    done = [r for r in simulated(cluster, trace) if r.finished]
    return {
        "ttft": [r.ttft_s for r in done],
        "tbt": [(r.e2e_s - r.ttft_s) / r.num_received for r in done],
        "e2e": [r.e2e_s for r in done],
    }


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with perf_model.csv, traces and results"
    )
    parser.add_argument("--with-ours", action="store_true", help="our own simulator as well")
    arguments = parser.parse_args()
    results, wrong = {}, 0
    paths = sorted((arguments.data / "results" / "requests").glob("*.csv.gz"))
    if not paths:
        parser.error(f"{arguments.data} has no results")
    for path in paths:
        name = path.name.removesuffix(".csv.gz")
        found = results[name] = compare(arguments.data, path, arguments.with_ours)
        worst = max(abs(error) for quantity in found["error"].values() for error in quantity.values())
        agrees = found["worst_difference_of_a_request_s"] < 1e-6 if "unit" in name else worst <= 0.02
        agrees = agrees and found["done"] == found["requests"]
        wrong += not agrees
        each = found["worst_difference_of_a_request_s"]
        print(
            f"{'agrees' if agrees else 'DIFFERS':8}{name}: worst percentile {worst:.2%}, worst request "
            f"{each:.6f} s",
            flush=True,
        )
    write_record(arguments.json, {"environment": environment(), "runs": results})
    print(
        f"{len(results) - wrong} of {len(results)} runs agree (unit cases to 1e-6 s a request, others to 2% "
        "of any percentile)"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
