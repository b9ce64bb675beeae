"""Does an imitation of DistServe's simulator, quirks included, give its results? And how much do ours differ,
as we really schedule?

The same coefficients, traces and numbers of workers: percentiles of TTFT, TPOT and E2E, and the share of the
requests within two pairs of bounds. TPOT is DistServe's, (last token - first token) / tokens. Then its
analytic case: two prefill workers for one decode worker.

    python -m splitserve.bench.studies.validate_distserve --data ../shared/data/distserve --with-ours \\
        --json out.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.latency_profile import Memory, Piece, Profile, StepModel
from ...planner.profile.published import import_published
from ...planner.search.candidates import Candidate, Hardware, Kind
from ...planner.search.demand import Demand, bound
from ...planner.simulator.cluster import Cluster, Pool
from ...traces.readers import open_trace
from ..environment import environment, option_parser, write_record
from ..peers.distserve_machine import CONTEXT_TOKEN_S, PROMPT_STEP_S, STEP_S, DistServeCluster
from .live_errors import simulated

BOUNDS = {"attain_250_100": (0.25, 0.1), "attain_400_100": (0.4, 0.1)}
AGREES = 0.02


def figures(
    ttft: Sequence[float], tpot: Sequence[float], e2e: Sequence[float], num_asked: int
) -> dict[str, Any]:
    """Figures in the form of simdistserve_results.json; times in ms."""
    times = {"ttft_ms": np.array(ttft), "tpot_ms": np.array(tpot), "e2e_ms": np.array(e2e)}
    found: dict[str, Any] = {
        name: {f"p{p}": 1e3 * float(np.percentile(t, p)) for p in (50, 90, 99)} for name, t in times.items()
    }
    for name, (most_ttft, most_tpot) in BOUNDS.items():
        found[name] = (
            float(((times["ttft_ms"] <= most_ttft) & (times["tpot_ms"] <= most_tpot)).sum()) / num_asked
        )
    return found


def imitated(data: Path, row: dict[str, Any]) -> dict[str, Any]:
    asked = DistServeCluster(_profile(data, row), row["P"], row["D"]).run(
        open_trace(data / f"{row['trace']}.gz")
    )
    return figures([a.ttft_s for a in asked], [a.tpot_s for a in asked], [a.e2e_s for a in asked], len(asked))


def ours(data: Path, row: dict[str, Any]) -> dict[str, Any]:
    """The same cluster and trace as we schedule: chunked prefill, shortest first, decode workers by room; the
    costs of a step are kept."""
    profile = _profile(data, row)
    prefill = profile.prefill.model_copy(update={"pieces": tuple(_dearer(p) for p in profile.prefill.pieces)})
    decode = profile.decode.model_copy(
        update={
            "pieces": tuple(
                p.model_copy(update={"read_s": p.read_s + CONTEXT_TOKEN_S}) for p in profile.decode.pieces
            )
        }
    )
    profile = profile.model_copy(
        update={
            "prefill": prefill,
            "decode": decode,
            "prefill_loop_s": PROMPT_STEP_S,
            "decode_loop_s": STEP_S,
        }
    )
    pools = (
        Pool(role="prefill", count=row["P"], profile=profile, max_batch_tokens=2048),
        Pool(role="decode", count=row["D"], profile=profile, max_num_seqs=1024),
    )
    cluster = Cluster(pools=pools, max_queue=1 << 30, coordinator_s=0.0, request_timeout_s=1e5)
    records = simulated(cluster, open_trace(data / f"{row['trace']}.gz"))
    done = [r for r in records if r.finished]
    tpot = [(r.e2e_s - r.ttft_s) / r.num_received for r in done]
    return figures([r.ttft_s for r in done], tpot, [r.e2e_s for r in done], len(records))


def _profile(data: Path, row: dict[str, Any]) -> Profile:
    return import_published(
        data / "profiler-a100-80g.distserve.json",
        row["model"].replace("opt_", "facebook/opt-"),
        "",
        row["tp"],
    )


def _dearer(piece: Piece) -> Piece:
    return piece.model_copy(
        update={"curve": tuple((units, seconds + CONTEXT_TOKEN_S * units) for units, seconds in piece.curve)}
    )


def worst_error(found: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Relative of the percentiles, absolute of the shares."""
    names = ("ttft_ms", "tpot_ms", "e2e_ms")
    of_times = [abs(found[name][p] / theirs[name][p] - 1) for name in names for p in ("p50", "p90", "p99")]
    return max(
        *(float(error) for error in of_times),
        *(abs(float(found[name]) - float(theirs[name])) for name in BOUNDS),
    )


def two_to_one() -> dict[str, Any]:
    """13B on A100s, 512 prompt and 64 output tokens: a prefill worker bears 5.6 requests/s, a decode worker
    10, so two and one bear 10,
    3.3 a GPU. The planner's bound of both ratios of three workers."""
    batch = 64
    line = StepModel(pieces=(Piece(curve=((0, 0.0), (512, 1 / 5.6))),))
    token = StepModel(pieces=(Piece(curve=((0, batch / 640), (64, batch / 640))),))
    memory = Memory(block_size=16, num_blocks=8192, block_bytes=1, num_layers=1, max_model_len=2048)
    hardware = Hardware((Kind.of(Profile(name="example", memory=memory, prefill=line, decode=token)),))
    demand = Demand(prompt=512, output=65, context=544, reads=256)
    bounds = {
        c.ratio: bound(c, hardware, demand, None)
        for c in (Candidate(1, 2, 0, 512, batch), Candidate(2, 1, 0, 512, batch))
    }
    best = max(bounds, key=lambda ratio: bounds[ratio])
    return {"bound_per_s": bounds, "best": best, "per_gpu": bounds[best] / 3}


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with the profile, the traces and simdistserve_results.json",
    )
    parser.add_argument("--with-ours", action="store_true", help="our own simulator as well")
    arguments = parser.parse_args()
    rows = json.loads((arguments.data / "simdistserve_results.json").read_text())
    results, wrong = [], 0
    for row in rows:
        found = imitated(arguments.data, row)
        error = worst_error(found, row)
        wrong += error > AGREES
        name = f"{row['model']} {row['P']}P{row['D']}D {row['trace'].split('_')[2]}"
        print(f"{'agrees' if error <= AGREES else 'DIFFERS':8}{name:20} worst {error:.2%}", flush=True)
        result = {"cluster": name, "simdistserve": row, "imitated": found, "worst_error": error}
        if arguments.with_ours:
            result["ours"] = ours(arguments.data, row)
        results.append(result)
    example = two_to_one()
    print(f"analytic case (DistServe: 2P1D, 3.3): {example}")
    print(
        f"{len(rows) - wrong} of {len(rows)} runs agree (to {AGREES:.0%} of any percentile, and of any "
        "attainment)"
    )
    record = {"environment": environment(), "runs": results, "two_to_one": example}
    write_record(arguments.json, record)
    return int(wrong > 0 or example["best"] != "2P:1D")


if __name__ == "__main__":
    sys.exit(main())
