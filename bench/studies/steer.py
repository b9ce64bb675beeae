"""The pool controller against an oracle, simulated: a load that shifts between code-like and
conversation-like traffic.

    python -m splitserve.bench.studies.steer [--phases 4] [--phase-s 180] [--seeds 1 2 3] \\
        [--json bench/results/steer.json]

The oracle knows afterwards which static ratio was best in each phase: it serves the very same requests, each
phase's alone on idle workers, with every ratio. Goodput is the number of requests a second that met both
objectives. Beside it: constant load (no flip may follow another back), and a controller whose profile is
three times wrong about prompts. Ends with status 1 if a goal is missed with any seed: 0.93 of the oracle's
goodput, more than the best single ratio's, no oscillation under constant load.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field

from ...engine.latency_profile import Profile
from ...planner.simulator.records import RequestRecord
from ...planner.simulator.simulation import Simulation
from ...planner.simulator.slo import Slo
from ...steering.fleet import Decision
from ...steering.options import SteeringOptions
from ...steering.steering import Steering
from ...traces.operators import cut
from ..environment import environment, option_parser, write_record
from .steer_verdict import missed_in_simulation, num_undone
from .steer_workload import CHAT, CODE, NUM_WORKERS, TPOT_S, TTFT_S, Phase, cluster, load, worker

OPTIONS = SteeringOptions(TTFT_S, TPOT_S, mode="act")
SLO = Slo(TTFT_S, TPOT_S)
PROCESSES = 2


@dataclass(slots=True)
class Outcome:
    """``good``: requests that met the objectives, by the phase in which they came."""

    prefill: int  # workers at the beginning
    good: list[int]
    total: list[int]
    flips: list[Decision] = field(default_factory=list)
    state: str = ""

    @property
    def num_good(self) -> int:
        return sum(self.good)


def run(
    phases: Sequence[Phase],
    phase_s: float,
    prefill: int,
    seed: int,
    num_workers: int = NUM_WORKERS,
    steered: bool = False,
    believed: Profile | None = None,
    only: int | None = None,
    mixed: int = 0,
    by_rules: bool = False,
) -> Outcome:
    """One cluster under the load. ``believed``: the profile that the controller goes by, where not the true
    one; ``only``: the phase whose requests alone come; ``mixed``: number of workers with both roles;
    ``by_rules``: the controller has no profile."""
    true, trace = worker(), load(phases, phase_s, seed, num_workers)
    if only is not None:
        phases, trace = [phases[only]], cut(trace, only * phase_s, (only + 1) * phase_s)
    outcome = Outcome(prefill, [0] * len(phases), [0] * len(phases))

    def count(record: RequestRecord) -> None:
        phase = min(int(record.arrival_s // phase_s), len(phases) - 1)
        outcome.total[phase] += 1
        outcome.good[phase] += SLO.met_by(record)

    steering = Steering(OPTIONS, None if by_rules else believed or true) if steered else None
    workers = cluster(true, prefill, num_workers - prefill - mixed, mixed)
    Simulation(workers, seed, SLO, count, steering=steering).run(trace)
    if steering is not None:
        outcome.flips = [d for d in steering.controller.decisions if d.kind == "flip"]
        outcome.state = steering.controller.state
    return outcome


def study(num_phases: int, phase_s: float, seed: int) -> dict[str, object]:
    """All runs, and what follows from them."""
    phases, ratios = [CODE if i % 2 == 0 else CHAT for i in range(num_phases)], range(1, NUM_WORKERS)
    middle = NUM_WORKERS // 2
    wrong = worker("three times too slow", 3.0)
    with ProcessPoolExecutor(PROCESSES) as pool:
        alone = [
            [pool.submit(run, phases, phase_s, p, seed, only=i) for p in ratios] for i in range(num_phases)
        ]
        static = [pool.submit(run, phases, phase_s, p, seed) for p in ratios]
        steered = pool.submit(run, phases, phase_s, middle, seed, NUM_WORKERS, True)
        constant = [
            pool.submit(run, [phase] * 2, phase_s, middle, seed, NUM_WORKERS, True) for phase in (CODE, CHAT)
        ]
        misled = pool.submit(run, phases, phase_s, middle, seed, NUM_WORKERS, True, wrong)
        best = [max((f.result() for f in futures), key=lambda o: o.num_good) for futures in alone]
        statics = [future.result() for future in static]
        oracle = sum(outcome.num_good for outcome in best)
        single = max(statics, key=lambda outcome: outcome.num_good)
        found, span = steered.result(), num_phases * phase_s
        return {
            "phases": [phase.name for phase in phases],
            "phase_s": phase_s,
            "seed": seed,
            "num_requests": sum(found.total),
            "best_ratio_by_phase": [_ratio(outcome.prefill) for outcome in best],
            "oracle_good_by_phase": [outcome.num_good for outcome in best],
            "goodput": {
                "oracle": oracle / span,
                "steered": found.num_good / span,
                "best_single_static": single.num_good / span,
                "misled": misled.result().num_good / span,
            },
            "best_single_static": _ratio(single.prefill),
            "static": {_ratio(o.prefill): o.num_good / span for o in statics},
            "of_oracle": found.num_good / oracle,
            "over_best_static": found.num_good / max(1, single.num_good),
            "good_by_phase": found.good,
            "requests_by_phase": found.total,
            "flips": [asdict(decision) for decision in found.flips],
            "flips_under_constant_load": {
                p.name: len(f.result().flips) for p, f in zip((CODE, CHAT), constant, strict=True)
            },
            "undone_under_constant_load": {
                p.name: num_undone(f.result().flips) for p, f in zip((CODE, CHAT), constant, strict=True)
            },
            "flips_misled": len(misled.result().flips),
        }


def _ratio(prefill: int) -> str:
    return f"{prefill}P:{NUM_WORKERS - prefill}D"


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--phases", type=int, default=4, help="of the shifting load")
    parser.add_argument("--phase-s", type=float, default=180.0, help="length of each, in simulated seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="a study with each")
    options = parser.parse_args()
    machine = environment()
    found = [study(options.phases, options.phase_s, seed) for seed in options.seeds]
    for of_seed in found:
        shown = {name: value for name, value in of_seed.items() if name != "flips"}
        print(json.dumps(shown, indent=1))
    missed = [
        f"seed {of_seed['seed']}: {sentence}"
        for of_seed in found
        for sentence in missed_in_simulation(of_seed)
    ]
    print("\n".join(f"missed: {sentence}" for sentence in missed) or "every goal was reached")
    write_record(options.json, {"environment": machine, "missed": missed, "studies": found})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
