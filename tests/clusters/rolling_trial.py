"""What is done to a running cluster, under 32 streams with idempotency keys: each process is upgraded to a
build with the next wire version, a coordinator is killed, a node drained, a node cut off, and the cluster
scaled out and back.

    PYTHONPATH=tests python tests/clusters/rolling_trial.py bench/results/rolling.json

Nodes are network namespaces of this machine: needs root and iproute2. Takes three minutes; not a part of the
tests. Exit status 0: no answer was lost, none differed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from e2e.cluster import free_port
from namespaces import HERE, cut, inside, join, nodes, on_node
from resuming_load import NUM_STREAMS, Streams

from splitserve.bench.environment import environment
from splitserve.bench.operator_auth import OperatorAuth
from splitserve.cli.settings import DEMO_MODEL, DEMO_MODEL_NAME
from splitserve.transport.channels.keys import generate_key

CUT_S = 8.0
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
HTTP = httpx.Client(timeout=30, trust_env=False, auth=OperatorAuth())


class Trial:
    """Two coordinators here, and workers on the nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, dict[str, subprocess.Popen[bytes]]()
        generate_key(folder / "key")
        self._ports = {f"coordinator-{i}": (free_port(), free_port()) for i in range(2)}
        self.urls = [f"http://127.0.0.1:{http}" for http, _ in self._ports.values()]

    def start(self, name: str, node: str = "", *, next_build: bool = False) -> None:
        """Start a process, by its name a coordinator or a worker of a role."""
        role = name.partition("-")[0]
        command = [sys.executable, "-m", "support.next_build" if next_build else "splitserve.cli.main", role]
        command += ["--model", str(DEMO_MODEL), "--key-file", str(self.folder / "key")]
        if role == "coordinator":
            http, control = self._ports[name]
            command += ["--served-model-name", DEMO_MODEL_NAME]
            command += ["--port", str(http), "--control-address", f"tcp://{HERE}:{control}"]
        else:
            addresses = ",".join(f"tcp://{HERE}:{control}" for _, control in self._ports.values())
            command = [*on_node(node), *command, "--name", name, "--exact"]
            command += ["--coordinator", addresses, "--num-blocks", "1200", "--mover", "tcp"]
            listen = "tcp://0.0.0.0:*"
            command += ["--log-format", "json"]
            command += ["--listen", listen, "--data-listen", listen] if role == "decode" else []
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRON)

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> float:
        """Return the seconds that it took to end."""
        began, process = time.monotonic(), self.running.pop(name)
        process.send_signal(how)
        process.wait(60)
        return time.monotonic() - began

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def state(self, url: str) -> dict[str, Any]:
        found: dict[str, Any] = HTTP.get(f"{url}/debug/state").json()
        return found

    def has(self, *names: str) -> bool:
        """Whether every coordinator has exactly these workers, and is ready."""
        with contextlib.suppress(httpx.HTTPError):
            for url in self.urls:
                workers = [w["worker_id"] for w in self.state(url)["workers"] if not w["draining"]]
                if sorted(workers) != sorted(names) or HTTP.get(f"{url}/ready").status_code != 200:
                    return False
            return True
        return False


async def until(what: str, condition: Callable[[], bool], timeout_s: float = 120.0) -> float:
    """Return the seconds it took."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() - began > timeout_s:
            raise SystemExit(f"{what}: not within {timeout_s:g} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def acts(trial: Trial, streams: Streams, report: dict[str, Any]) -> None:
    """Everything that is done to it, one after the other."""
    home = {"prefill-0": "a", "decode-0": "a", "prefill-1": "b", "decode-1": "b"}
    ended, back = [], []
    for name, node in home.items():
        streams.act = "a worker is upgraded"
        ended.append(await asyncio.to_thread(trial.end, name))
        trial.start(name, node, next_build=True)
        back.append(await until(f"{name} is back", lambda: trial.has(*home)))
    report["a worker is upgraded: seconds to drain, then until it is back"] = [_median(ended), _median(back)]
    for name, how in (("coordinator-0", signal.SIGTERM), ("coordinator-1", signal.SIGKILL)):
        streams.act = f"a coordinator gets {how.name}"
        await asyncio.to_thread(trial.end, name, how)
        trial.start(name, next_build=True)
        seconds = await until(f"{name} is back", lambda: trial.has(*home))
        report[f"seconds until a coordinator is back after {how.name}"] = round(seconds, 1)
    streams.act = "a node is drained"
    await asyncio.gather(*(asyncio.to_thread(trial.end, name) for name in ("prefill-1", "decode-1")))
    await until("node b is empty", lambda: trial.has("prefill-0", "decode-0"))
    await asyncio.sleep(CUT_S)
    for name in ("prefill-1", "decode-1"):
        trial.start(name, "b", next_build=True)
    await until("node b is back", lambda: trial.has(*home))
    streams.act = "a node is cut off"
    cut("b")
    seconds = await until("node b is noticed to be lost", lambda: trial.has("prefill-0", "decode-0"))
    report["seconds until a node that is cut off is left out"] = round(seconds, 1)
    await asyncio.sleep(CUT_S)
    join("b")
    report["seconds until it serves again"] = round(
        await until("node b is back", lambda: trial.has(*home)), 1
    )
    streams.act = "scaled to 4P4D"
    more = {f"{role}-{i}": node for role in ("prefill", "decode") for i, node in ((2, "a"), (3, "b"))}
    began = time.time()
    for name, node in more.items():
        trial.start(name, node, next_build=True)
    served = await first_served(trial, list(more), began)
    await until("4P4D", lambda: trial.has(*home, *more))
    found = [phases(trial.folder / f"{name}.log", began, at) for name, at in served.items()]
    names = ("imports", "model", "connection", "first request")
    report["4P4D: seconds of a new worker's start, of four at once"] = {
        name: _median(list(times)) for name, times in zip(names, zip(*found, strict=True), strict=True)
    }
    streams.act = "scaled back"
    for name in more:
        await asyncio.to_thread(trial.end, name)
    await until("2P2D", lambda: trial.has(*home))


async def first_served(trial: Trial, names: list[str], began: float) -> dict[str, float]:
    """Return when each new worker first held a request, in seconds of the day."""
    seen: dict[str, float] = {}
    while len(seen) < len(names) and time.time() < began + 60:
        for url in trial.urls:
            for worker in (await asyncio.to_thread(trial.state, url))["workers"]:
                if worker["worker_id"] in names and worker["dispatches"]:
                    seen.setdefault(worker["worker_id"], time.time())
        await asyncio.sleep(0.02)
    return seen


def phases(log: Path, began: float, served: float) -> list[float]:
    """Return the seconds of a worker's start: until its first line, its model is loaded, it is connected, it
    serves."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]

    def at(text: str) -> float:
        return next(datetime.fromisoformat(e["time"]).timestamp() for e in lines if text in e["message"])

    times = [began, at(""), at(", ready in "), at("connected to the coordinator"), served]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 1)


async def play(trial: Trial) -> dict[str, Any]:
    """Return what was seen."""
    for name in ("coordinator-0", "coordinator-1"):
        trial.start(name)
    for name, node in {"prefill-0": "a", "decode-0": "a", "prefill-1": "b", "decode-1": "b"}.items():
        trial.start(name, node)
    await until("2P2D", lambda: trial.has("prefill-0", "decode-0", "prefill-1", "decode-1"))
    streams, report, began = Streams(trial.urls), dict[str, Any](), time.monotonic()
    await streams.expect()
    streams.act = "nothing"
    running = asyncio.create_task(streams.run())
    await asyncio.sleep(CUT_S)
    await acts(trial, streams, report)
    streams.stop.set()
    await running
    report["longest pause of a stream in seconds, by what was done"] = {
        act: round(pause, 1) for act, pause in streams.longest.items()
    }
    report["streams at a time"], report["seconds"] = NUM_STREAMS, round(time.monotonic() - began)
    return {**report, **streams.counts, "problems": streams.problems[:5]}


def main() -> int:
    inside()
    with nodes("ab"), tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        try:
            found = asyncio.run(play(trial))
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                print(log.name, log.read_text()[-1500:], sep="\n", file=sys.stderr)
            raise
        finally:
            trial.close()
    result = {"environment": environment(), **found}
    print(json.dumps(result, indent=2))
    Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n")
    return 1 if found["different"] or found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
