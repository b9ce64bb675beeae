"""How far the pool controller falls below "leave the ratio alone", and below its own past, on random loads.

    python -m splitserve.bench.studies.steer_loads --loads 0 200 [--data ../shared/data] \\
        [--record bench/results/steer_loads.jsonl] [--controller present]
    python -m splitserve.bench.studies.steer_loads --report          # of all that is recorded, worst first
    python -m splitserve.bench.studies.steer_loads --simulated --record FILE --loads 0 200 ...

Each load (``random_loads.py``) is served by every ratio left alone, and by the controller. A row of the
record keeps that, so a second call adds loads, or another version of the controller under its own name.

``--simulated``: the controller's run is the simulator's, not its sketch's; ``--borrow``: so too, with workers
that borrow.

The oracle serves each part of 30 s or more alone on idle workers, by the best ratio of that part. It is run
where the best single ratio serves less than 98% well.
"""

from __future__ import annotations

import json
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ...planner.search.sketch import SketchPool
from ...planner.search.step_times import StepTimes
from ...planner.simulator.records import RequestRecord
from ...planner.simulator.simulation import Simulation
from ...planner.simulator.slo import Slo
from ...steering.steering import Steering
from ...traces.request import Trace, TraceRequest
from ..environment import option_parser
from .random_loads import NUM_WORKERS, OPTIONS, RandomLoad, drawn, small_worker
from .steer_sketch import SteeredSketch, arrivals_of
from .steer_workload import TPOT_S, TTFT_S, cluster

SLO = Slo(TTFT_S, TPOT_S)
HARM = 0.01  # of all requests: no load may lose more
RECORD = Path(__file__).resolve().parents[1] / "results/steer_loads.jsonl"


def served(
    requests: tuple[TraceRequest, ...],
    prefill: int,
    steered: bool = False,
    full: bool = False,
    borrow: bool = False,
) -> tuple[float, int]:
    """Serve them. Return the number of good requests and of changes of the ratio. ``full``: by the simulator,
    not by its sketch; ``borrow``: there by workers that borrow."""
    steering = Steering(OPTIONS, small_worker()) if steered else None
    serve = partial(simulated, borrow=borrow) if full else sketched
    good = serve(requests, prefill, steering)
    flips = [] if steering is None else [d.at for d in steering.controller.decisions if d.kind == "flip"]
    return good, len(set(flips))


def sketched(requests: tuple[TraceRequest, ...], prefill: int, steering: Steering | None) -> float:
    """Return the number of good requests."""
    times = step_times()
    pools = [SketchPool(times, prefill, True, False), SketchPool(times, NUM_WORKERS - prefill, False, True)]
    arrivals = [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in requests]
    flip_s = small_worker().flip_s or 0.0
    return SteeredSketch(pools, SLO, steering, flip_s).run(arrivals_of(arrivals)).num_good


def simulated(
    requests: tuple[TraceRequest, ...], prefill: int, steering: Steering | None, borrow: bool = False
) -> float:
    """Return the number of good requests."""
    good = 0.0

    def count(record: RequestRecord) -> None:
        nonlocal good
        good += SLO.met_by(record)

    workers = cluster(small_worker(), prefill, NUM_WORKERS - prefill, borrow=borrow)
    simulation = Simulation(workers, 0, SLO, count, steering=steering)
    simulation.run(Trace("load", lambda: iter(requests), None))
    return good


@cache
def step_times() -> StepTimes:
    return StepTimes(small_worker(), 2048, 128)


def left_alone(load: RandomLoad) -> dict[str, Any]:
    """Every ratio left alone, and the oracle where it may move; shares of all requests."""
    count = len(load.requests)
    static = {p: served(load.requests, p)[0] / count for p in range(1, NUM_WORKERS)}
    row: dict[str, Any] = {
        "load": load.number,
        "kind": load.kind,
        "seconds": round(load.requests[-1].arrival_s),
        "requests": count,
        "begins": load.prefill,
        "static": {str(p): round(share, 4) for p, share in static.items()},
        "oracle": None,
        "steered": {},
        "changes": {},
    }
    if max(static.values()) < 0.98:
        since, good, ratios = 0.0, 0.0, set()
        for end in [*load.parts[:-1], 1e9]:
            part = tuple(r for r in load.requests if since <= r.arrival_s < end)
            since = end
            if part:
                best, ratio = max((served(part, p)[0], p) for p in range(1, NUM_WORKERS))
                good += best
                ratios.add(ratio)
        row["oracle"] = round(good / count, 4) if len(ratios) > 1 else None
    return row


QUANTILES = {"worst": 0.0, "1%": 0.01, "5%": 0.05, "10%": 0.1, "25%": 0.25, "median": 0.5, "best": 1.0}


def below_alone(row: dict[str, Any], controller: str) -> float:
    """By how much its share of good requests is below that of the first ratio left alone."""
    return float(row["static"][str(row["begins"])] - row["steered"][controller])


def harm(row: dict[str, Any], controller: str) -> float:
    """The same, below the better of leaving alone and its own past."""
    mine, past = float(row["steered"][controller]), row["steered"].items()
    return max(
        [below_alone(row, controller), *(float(share) - mine for name, share in past if name != controller)]
    )


def report(rows: list[dict[str, Any]], controller: str) -> str:
    """The distribution, worst first."""
    mine = [row for row in rows if controller in row["steered"]]
    if not mine:
        return f"no load has been served by {controller}"
    lines = [f"{len(mine)} loads, {sum(row['requests'] for row in mine)} requests, controller {controller}"]
    for name, measure in (("leaving it alone", below_alone), ("the better of that and its past", harm)):
        found = sorted((measure(row, controller) for row in mine), reverse=True)
        at = {label: found[int(q * (len(found) - 1))] for label, q in QUANTILES.items()}
        shown = ", ".join(f"{label} {100 * value:+.1f}" for label, value in at.items())
        over = sum(one > HARM for one in found)
        lines.append(f"points below {name}: {shown}; more than 1 point: {over} of {len(found)}")
    ratios = sorted(row["steered"][controller] / row["oracle"] for row in mine if row["oracle"])
    if ratios:
        lines.append(
            f"share of the oracle where it moves ({len(ratios)} loads): worst {ratios[0]:.3f}, "
            f"10% {ratios[len(ratios) // 10]:.3f}, median {ratios[len(ratios) // 2]:.3f}; "
            f"at least 0.93: {sum(one >= 0.93 for one in ratios)}"
        )
    alone = np.mean([row["static"][str(row["begins"])] for row in mine])
    best, steered = (
        np.mean([max(row["static"].values()) for row in mine]),
        np.mean([row["steered"][controller] for row in mine]),
    )
    lines.append(f"mean share good: alone {alone:.1%}, best single ratio {best:.1%}, steered {steered:.1%}")
    return "\n".join(lines + [_line(row, controller) for row in _worst_first(mine, controller)[:15]])


def _worst_first(rows: list[dict[str, Any]], controller: str) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -harm(row, controller))


def _line(row: dict[str, Any], controller: str) -> str:
    static = " ".join(f"{100 * share:.1f}" for share in row["static"].values())
    oracle = "-" if row["oracle"] is None else f"{100 * row['oracle']:.1f}"
    steered = "  ".join(f"{n} {100 * v:.1f} ({row['changes'][n]})" for n, v in row["steered"].items())
    return (
        f"{100 * harm(row, controller):+6.1f}  load {row['load']:4d}  {row['kind']:13s} "
        f"begins {row['begins']}P  static {static}  oracle {oracle}  {steered}"
    )


def read(record: Path) -> dict[int, dict[str, Any]]:
    if not record.exists():
        return {}
    return {row["load"]: row for row in map(json.loads, record.read_text().splitlines())}


def write(record: Path, rows: dict[int, dict[str, Any]]) -> None:
    record.write_text("".join(json.dumps(rows[number]) + "\n" for number in sorted(rows)))


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--loads", type=int, nargs=2, default=(0, 0), help="from this number to before that")
    parser.add_argument("--data", type=Path, help="folder with azure, mooncake and servegen")
    parser.add_argument("--record", type=Path, default=RECORD, help="rows are added to it")
    parser.add_argument("--controller", default="present", help="name of this version in the record")
    parser.add_argument("--simulated", action="store_true", help="steer in the simulator, not its sketch")
    parser.add_argument("--borrow", action="store_true", help="so too, workers that borrow")
    parser.add_argument("--again", action="store_true", help="steer again what this version has steered")
    parser.add_argument("--report", action="store_true", help="print the distribution")
    options = parser.parse_args()
    rows = read(options.record)
    for number in range(*options.loads):
        row = rows.get(number)
        if row and options.controller in row["steered"] and not options.again:
            continue
        load = drawn(number, options.data)
        if load is None:
            continue
        row = rows.setdefault(number, row or left_alone(load))
        good, changes = served(
            load.requests, load.prefill, True, options.simulated or options.borrow, options.borrow
        )
        row["steered"][options.controller] = round(good / row["requests"], 4)
        row["changes"][options.controller] = changes
        if number % 50 == 49:
            write(options.record, rows)
    if options.loads[1]:
        write(options.record, rows)
    if options.report:
        print(report(list(rows.values()), options.controller))
    return 0


if __name__ == "__main__":
    sys.exit(main())
