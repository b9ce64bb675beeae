"""Hostile HTTP requests against a real coordinator with keys, limits, metering and batches on, and workers
that answer at once.

    python -m splitserve.bench.http.fuzz_http [--requests 1000000] [--minutes 60] \\
        [--json bench/results/fuzz_http.json]

Another client reads streams meanwhile: the record has its longest gap (this process plays the workers, so its
own stalls are in it). Valid, changed, cut short, wrongly framed, huge, deep, slow, stalled, pipelined, half
closed (see ``hostile_requests``). No answer is a 500, none fails to come, no connection stays open, nothing
is left running, the log has no error, and memory is bounded: all else is a failure, and the command ends with
status 1. Each run is added to the record; its seed is the number of requests before it.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil

from ...cli.up import free_port
from ...coordinator.tenants.store import TenantStore
from ..environment import environment, option_parser, write_record
from ..fake_workers import FakeWorkers
from ..live_cluster import coordinator_command, started, stop
from ..operator_auth import OperatorAuth
from .bystander import beside
from .hostile_client import HostileClient, Tally
from .hostile_requests import HostileRequests
from .streaming_servers import Server, model_folder, workers_of

CONTEXT = 256  # tokens: what a request gets that sets no bound
STEP_EVERY_S = 0.002
SAMPLE_EVERY_S = 0.5
MAX_GROWTH_MB = 64.0  # from the first quarter to the end


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="send no more after so long, and record what there is",
    )
    parser.add_argument("--seed", type=int, help="default: the number of requests in the record")
    parser.add_argument("--json", type=Path, help="add this run to the record here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the coordinator ends, too
    record: dict[str, Any] = {"requests": 0, "failures": 0, "runs": []}
    if options.json and options.json.exists():
        record = json.loads(options.json.read_text())
    run = fuzz(
        options.requests,
        record["requests"] if options.seed is None else options.seed,
        longest_s=60 * options.minutes,
    )
    print(json.dumps(run, indent=1))
    if options.json:
        record["requests"] += run["requests"]
        record["failures"] += len(run["failures"])
        record["runs"].append(run)
        write_record(options.json, record)
    return 1 if run["failures"] else 0


def fuzz(
    num_requests: int,
    seed: int,
    num_connections: int = 64,
    stalls: bool = True,
    longest_s: float = float("inf"),
) -> dict[str, Any]:
    """One run, JSON-ready; ``failures``: sentences, none if all is well. ``stalls``: also clients that stop
    in mid-request."""
    with tempfile.TemporaryDirectory() as name, attacked(Path(name)) as (server, key, log):
        with workers_of(server, Path(name)) as workers:
            client = HostileClient(
                server.port, HostileRequests(Random(seed), key, stalls), num_requests, num_connections
            )
            num_files, cpu_s, begin = server.process.num_fds(), server.cpu_s(), time.monotonic()
            with beside(server.port, CONTEXT // 2, key) as bystander:
                memory = attack(server, client, workers, num_requests, begin + longest_s)
                seen = bystander.seen
            seconds, cpu_s = time.monotonic() - begin, server.cpu_s() - cpu_s
            client.close()
            failures = [*client.tally.failures, *_left_behind(server, workers, num_files), *_growth(memory)]
        errors = _errors(log)
        return {
            "environment": environment(),
            "seed": seed,
            **as_json(client.tally),
            "seconds": round(seconds, 1),
            "coordinator_cpu_s": round(cpu_s, 1),
            "memory_mb": memory,
            "bystander": seen._asdict(),
            "failures": failures + errors,
        }


def attack(
    server: Server, client: HostileClient, workers: FakeWorkers, num_requests: int, deadline: float
) -> dict[str, float]:
    """Until all is sent and answered; nothing more is sent after ``deadline``. Resident MB: at the begin,
    after a quarter of the requests or of the time, the most, at the end."""
    memory, begin = {"begin": server.rss_mb(), "most": 0.0}, time.monotonic()
    stepped = sampled = 0.0
    while not client.done:
        client.turn(0.001)
        now = time.monotonic()
        if now >= stepped + STEP_EVERY_S:
            stepped = now
            workers.poll()
            if len(workers.dispatches):
                workers.step()
        if now >= sampled + SAMPLE_EVERY_S:
            sampled = now
            if now > deadline:
                client.send_no_more()
            memory["most"] = max(memory["most"], server.rss_mb())
            if "quarter" not in memory and (
                client.tally.requests >= num_requests // 4 or now >= begin + (deadline - begin) / 4
            ):
                memory["quarter"] = server.rss_mb()
    return {name: round(mb, 1) for name, mb in {**memory, "end": server.rss_mb()}.items()}


def as_json(tally: Tally) -> dict[str, Any]:
    """A tally, JSON-ready."""

    def sorted_counts(counts: Counter[Any]) -> dict[str, int]:
        return {str(name): count for name, count in sorted(counts.items(), key=lambda item: str(item[0]))}

    return {
        "requests": tally.requests,
        "kinds": sorted_counts(tally.kinds),
        "answers_by_status": sorted_counts(tally.statuses),
        "slowest": {"seconds": round(tally.slowest_s, 3), "kind": tally.slowest_kind},
        "failed_attempts": tally.num_failures,
        "client_stood_still_s": round(tally.stood_still_s, 1),
    }


def _left_behind(server: Server, workers: FakeWorkers, num_files: int) -> Iterator[str]:
    """What should be gone once every connection is."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        workers.poll()
        if len(workers.dispatches):
            workers.step()
        state = httpx.get(
            f"http://127.0.0.1:{server.port}/debug/state", timeout=20, auth=OperatorAuth()
        ).json()
        if not any(state["requests"].values()) and server.process.num_fds() <= num_files + 8:
            return
        time.sleep(0.01)
    yield f"left running: {state['requests']}, open files: {server.process.num_fds()} after {num_files}"


def _growth(memory: dict[str, float]) -> Iterator[str]:
    if (grown := memory["end"] - memory.get("quarter", memory["begin"])) > MAX_GROWTH_MB:
        yield f"memory grew by {grown:.0f} MB"


def _errors(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [
        f"in the log: {line}"
        for line in lines
        if " ERROR " in line or "Traceback" in line or "Error:" in line
    ][:20]


@contextmanager
def attacked(folder: Path) -> Iterator[tuple[Server, str, Path]]:
    """The coordinator by its command, a good key for it, and its log. It must live to the end, and stop on
    request."""
    model_folder(folder, CONTEXT)
    store = TenantStore(folder / "tenants", create=True)
    store.set_tenant("fuzz")
    key = store.create_key("fuzz", limits={"requests_per_minute": 1 << 49, "max_streams": 1 << 40}).key
    store.close()
    port, control = free_port("127.0.0.1"), f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    files = {"tenants_file": folder / "tenants", "batch_file": folder / "batches"}
    command, log = coordinator_command(folder, port, control, dead_after_s=60, **files), folder / "log"
    with started(command, f"http://127.0.0.1:{port}/health", log) as process:
        yield Server(port, control, psutil.Process(process.pid)), key, log
        stop(process, log)


if __name__ == "__main__":
    sys.exit(main())
