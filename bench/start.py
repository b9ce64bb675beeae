"""Time from `splitserve up` to a ready cluster: first starts, which pack the weights, and later ones.

    python -m splitserve.bench.start [--model 500m] [--rounds 3] [--cpu-memory-utilization 0.1] [--json FILE]

In turn: a start without kept weights, then one with them. Wall clock, and the processor time of all processes
until then, which a loaded machine changes less.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from .environment import environment
from .live_cluster import live_cluster
from .models import SHAPES, make_random_llama

WRITTEN_S = 120.0  # the longest wait for the packed weights of a first start


def start(model: Path, log: Path, options: list[str], first: bool) -> dict[str, float]:
    """One start; the first one waits until its packed weights are kept."""
    kept = model / ".splitserve"
    if first:
        shutil.rmtree(kept, ignore_errors=True)
    began = time.monotonic()
    with live_cluster(["--model", str(model), *options], log):
        ready_s = time.monotonic() - began
        times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
        deadline = time.monotonic() + WRITTEN_S
        while first and not list(kept.glob("*.packed")) and time.monotonic() < deadline:
            time.sleep(0.5)
    return {"ready_s": round(ready_s, 2), "cpu_s": round(sum(t.user + t.system for t in times), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="500m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-memory-utilization", default="0.1", help="of `splitserve up`")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = ["--cpu-memory-utilization", arguments.cpu_memory_utilization]
    record: dict[str, object] = {"environment": environment()}
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "model", Path(folder) / "log"
        make_random_llama(model, **SHAPES[arguments.model])
        runs: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
        for _ in range(arguments.rounds):
            for name, made in runs.items():
                made.append(start(model, log, options, first=name == "first"))
                print(name, made[-1], flush=True)
    record |= {"model": arguments.model, **runs}
    record["fastest"] = {
        name: {key: min(run[key] for run in made) for key in made[0]} for name, made in runs.items()
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
