"""Runs the simulator for long, or one seed again:

cd tests
python -m simulation --requests 5000000 --json ../bench/results/simulation.json
python -m simulation --scenario drawn --seed 123
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import sys
import time
from pathlib import Path

from simulation.campaign import Report, run, simulate_named
from simulation.scenario import NAMED

from splitserve.bench.environment import environment

SLICE = 20_000
"""Requests between two writings of the result."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description="The fault simulator.")
    parser.add_argument("--scenario", choices=["drawn", *NAMED], default="drawn", help="drawn: each seed draws its own")
    parser.add_argument("--seed", type=int, help="with --requests the first seed (default: random), else the one that is run")
    parser.add_argument("--requests", type=int, help="run seed after seed until so many requests have been simulated")
    parser.add_argument("--json", type=Path, help=f"write here what was done; again after every {SLICE} requests")
    options = parser.parse_args()
    if options.requests is None:
        if options.seed is None:
            parser.error("say --seed to run one world again, or --requests to run many")
        return _replay(options.scenario, options.seed)
    return _campaign(options)


def _replay(scenario: str, seed: int) -> int:
    world = simulate_named(scenario, seed)
    print(f"seed {seed}: {world.scenario}\n{dict(sorted(world.counts.items()))}")
    print("\n".join(world.violations) or "nothing found")
    print(world.traceback, end="")
    return 1 if world.violations else 0


def _campaign(options: argparse.Namespace) -> int:
    seed = first = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    began, total = time.monotonic(), Report()
    print(f"first seed {first}", flush=True)
    while total.num_requests < options.requests:
        report = run(seed, min(SLICE, options.requests - total.num_requests), options.scenario, stop_at_failures=sys.maxsize)
        seed += report.num_worlds
        total.merge(report)
        where = environment() | {"command": shlex.join(["python", "-m", "simulation", *sys.argv[1:]])}
        result: dict[str, object] = {"environment": where, "scenario": options.scenario, "first_seed": first, "last_seed": seed - 1}
        result |= {"wall_s": round(time.monotonic() - began, 1), **total.summary()}
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{total.num_requests} requests, {total.num_worlds} worlds, {len(total.failures)} failures", flush=True)
    print("\n".join(total.failures) or "nothing found")
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
