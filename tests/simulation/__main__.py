"""Runs the simulator for long, adds up what was run, or runs one seed again:

cd tests
python -m simulation --requests 5000000 --json ../bench/results/simulation.json
python -m simulation --add a.json b.json --json ../bench/results/simulation.json
python -m simulation --scenario drawn --seed 123
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
from pathlib import Path

from simulation.campaign import REQUESTS, run, simulate_named
from simulation.record import Piece, Record
from simulation.scenario import NAMED

from splitserve.bench.environment import environment

SLICE = 10_000
"""Requests between two writings of the result."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description="The fault simulator.")
    parser.add_argument(
        "--scenario", choices=["drawn", *NAMED], default="drawn", help="drawn: each seed draws its own"
    )
    parser.add_argument(
        "--seed", type=int, help="with --requests the first seed (default: random), else the one that is run"
    )
    parser.add_argument(
        "--requests", type=int, help="run seed after seed until so many requests have been simulated"
    )
    parser.add_argument(
        "--a-world",
        type=int,
        default=REQUESTS,
        help="requests of the one world that is run again (default: %(default)s)",
    )
    parser.add_argument(
        "--add",
        type=Path,
        nargs="+",
        default=[],
        help="put these records of earlier runs into that of --json",
    )
    parser.add_argument(
        "--json", type=Path, help=f"add here what was done; again after every {SLICE} requests"
    )
    options = parser.parse_args()
    if options.add:
        return _add(options, parser)
    if options.requests is not None:
        return _campaign(options)
    if options.seed is None:
        parser.error("say --seed to run one world again, or --requests to run many")
    return _replay(options.scenario, options.seed, options.a_world)


def _replay(scenario: str, seed: int, requests: int) -> int:
    world = simulate_named(scenario, seed, requests)
    print(f"seed {seed}: {world.scenario}\n{dict(sorted(world.counts.items()))}")
    print("\n".join(world.violations) or "nothing found")
    print(world.traceback, end="")
    return 1 if world.violations else 0


def _campaign(options: argparse.Namespace) -> int:
    first = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    print(f"first seed {first}", flush=True)
    record = Record() if options.json is None else Record.read(options.json)
    where = environment()
    record.environment = where | {"command": shlex.join(["python", "-m", "simulation", *sys.argv[1:]])}
    piece = Piece(str(where["commit"]), str(where["date"]), options.scenario, first, first - 1)
    while piece.requests < options.requests:
        part = run(
            piece.last_seed + 1,
            min(SLICE, options.requests - piece.requests),
            options.scenario,
            stop_at_failures=sys.maxsize,
        )
        record.add(piece, part)
        if options.json is not None:
            record.write(options.json)
        print(f"{piece.requests} requests, {piece.failures} failures", *part.failures, sep="\n", flush=True)
    return 1 if piece.failures else 0


def _add(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.json is None:
        parser.error("say with --json where to put the sum")
    record = Record.read(options.json)
    for path in options.add:
        record.merge(Record.read(path))
    record.write(options.json)
    print(
        f"{record.sum.num_requests} requests in {len(record.pieces)} pieces, "
        f"{len(record.sum.failures)} failures"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
