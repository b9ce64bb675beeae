"""What steering loses beside mixed workers, simulated: beside them the pool controller changes no roles.

    python -m splitserve.bench.studies.steer_mixed [--mixed 2] [--phases 4] [--phase-s 40] [--seed 1] \\
        [--json bench/results/steer_mixed.json]

The shifting load of ``bench.steer`` on as many workers: all flexible and steered; some of them mixed, the
others flexible and in equal parts, with the controller switched on; and every static ratio of those others,
of which the best is known afterwards.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor

from ..environment import environment, option_parser, write_record
from .steer import PROCESSES, run
from .steer_workload import CHAT, CODE, NUM_WORKERS


def study(mixed: int, num_phases: int, phase_s: float, seed: int) -> dict[str, object]:
    """All runs: how many requests met both objectives in each."""
    phases = [CODE if i % 2 == 0 else CHAT for i in range(num_phases)]
    others = NUM_WORKERS - mixed
    with ProcessPoolExecutor(PROCESSES) as pool:
        steered = pool.submit(run, phases, phase_s, NUM_WORKERS // 2, seed, steered=True)
        held = pool.submit(run, phases, phase_s, others // 2, seed, steered=True, mixed=mixed)
        static = {p: pool.submit(run, phases, phase_s, p, seed, mixed=mixed) for p in range(1, others)}
        found = held.result()
        return {
            "mixed": mixed,
            "phase_s": phase_s,
            "seed": seed,
            "num_requests": sum(found.total),
            "good": {
                f"{NUM_WORKERS} flexible, steered": steered.result().num_good,
                f"{others // 2}P:{others - others // 2}D:{mixed}M, held": found.num_good,
                **{
                    f"{p}P:{others - p}D:{mixed}M, static": future.result().num_good
                    for p, future in static.items()
                },
            },
            "flips_beside_mixed": len(found.flips),
            "state_at_the_end": found.state,
        }


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument(
        "--mixed", type=int, choices=range(1, NUM_WORKERS - 1), default=2, help="of the 8 workers"
    )
    parser.add_argument("--phases", type=int, default=4, help="of the shifting load")
    parser.add_argument("--phase-s", type=float, default=40.0, help="length of each, in simulated seconds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    machine = environment()
    found = study(options.mixed, options.phases, options.phase_s, options.seed)
    print(json.dumps(found, indent=1))
    write_record(options.json, {"environment": machine, **found})


if __name__ == "__main__":
    main()
