"""Time from `splitserve up` to a ready cluster: first starts, which pack the weights, and later ones.

    python -m splitserve.bench.start [--model 500m] [--rounds 3] [--cpu-memory-utilization 0.1] [--json FILE]
    python -m splitserve.bench.start --load [--threads 1] ...

In turn: a start without kept weights, then one with them. Wall clock, and the processor time of all processes
until then, which a loaded machine changes less. ``--load``: of the model alone in a fresh process, from the
opening of its files to one that can run a step, without imports; and the memory that this takes as a multiple
of the weight files' size (``peak``: the most; ``resident``: afterwards). ``fresh_s``: the processor time that
the machine takes to find as much fresh memory, which a first start cannot do without.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import threading
import time
from pathlib import Path

import psutil

from ..engine.engine_config import EngineConfig
from ..engine.settings import WorkerSettings
from ..engine.step.model_runner import ModelRunner
from ..kernels.huge_pages import huge_page_bytes
from .environment import environment, option_parser, write_record
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


def load(model: Path, threads: int, first: bool) -> dict[str, float]:
    """Load in this process, whose first load it is."""
    from ..kernels import native_cpu  # noqa: F401 (an import is no part of loading)

    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before, cpu = status("VmRSS"), time.process_time()
    settings = WorkerSettings(
        model=model, insecure=True, device="cpu", num_blocks=16, max_model_len=256, threads=threads
    )
    runner = ModelRunner(EngineConfig(settings))
    cpu = time.process_time() - cpu
    phases = runner.phases.seconds
    result = {
        "load_s": phases["fingerprint"] + phases["weights"],
        "cpu_s": cpu,
        "peak": (status("VmHWM") - before) / size,
    }
    for thread in threading.enumerate():
        if thread.name == "packed-weights":
            thread.join()
    result["resident"] = (status("VmRSS") - before) / size
    if first:
        cpu = time.thread_time()
        huge_page_bytes(size).numpy().fill(1)
        result["fresh_s"] = time.thread_time() - cpu
    return {name: round(value, 2) for name, value in result.items()}


def status(name: str) -> int:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def load_apart(model: Path, threads: int, first: bool) -> dict[str, float]:
    if first:
        shutil.rmtree(model / ".splitserve", ignore_errors=True)
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(load, (model, threads, first))


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--model", choices=SHAPES, default="500m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-memory-utilization", default="0.1", help="of `splitserve up`")
    parser.add_argument("--load", action="store_true", help="the model alone")
    parser.add_argument("--threads", type=int, default=1, help="of a step, with --load")
    arguments = parser.parse_args()
    options = ["--cpu-memory-utilization", arguments.cpu_memory_utilization]
    record: dict[str, object] = {"environment": environment()}
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "model", Path(folder) / "log"
        make_random_llama(model, **SHAPES[arguments.model])
        runs: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
        for _ in range(arguments.rounds):
            for name, made in runs.items():
                if arguments.load:
                    made.append(load_apart(model, arguments.threads, first=name == "first"))
                else:
                    made.append(start(model, log, options, first=name == "first"))
                print(name, made[-1], flush=True)
    record |= {"model": arguments.model, **runs}
    record["fastest"] = {
        name: {key: min(run[key] for run in made) for key in made[0]} for name, made in runs.items()
    }
    write_record(arguments.json, record)


if __name__ == "__main__":
    main()
